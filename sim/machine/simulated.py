"""This module performs plans in virtual time: integer nanoseconds, no clock, no randomness.

Compute runs one batch after the other; links are `LinkTime`s that are brought up to date when
something happens to them. `machine.processes` states the same rules as SimPy processes, one event at
a time; both must give the same records, which is a test.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby

from moetier.sim.layout import Layout
from moetier.sim.machine.base import LayerTiming, OnSpan, Span
from moetier.sim.machine.costs import Costs
from moetier.sim.machine.hierarchy import Hierarchy
from moetier.sim.machine.links import UNSTARTED, LinkTime, OnStart, Transfer, by_ready
from moetier.sim.plan import LayerPlan


class SimMachine:
    """One machine's tiers, links and compute, from time 0 on."""

    def __init__(
        self, hierarchy: Hierarchy, costs: Costs, layout: Layout, on_span: OnSpan | None = None
    ) -> None:
        """Begin idle; *on_span* hears of everything that occupies compute or a link."""
        self.now = 0
        self._costs, self._layout, self._on_span = costs, layout, on_span
        self._names = hierarchy.names
        self.links = [LinkTime(x, self._watch(f"{x.src} to {x.dst}")) for x in hierarchy.links]
        self.down = [LinkTime(x, self._watch(f"{x.src} to {x.dst}")) for x in hierarchy.demotion]
        self._under_way: dict[int, Transfer] = {}  # prefetched and not asked for yet
        # One lane, and nobody watching: a layer's misses need no object each.
        self._plain = self.links[0].single and layout.n_parts == 1

    def execute(self, plan: LayerPlan) -> LayerTiming:
        """Perform one batch and return when its parts happened."""
        start = self.now
        dense = self._costs.dense_ns(plan.batch)
        landed = copied = cpu_ready = asked = start + dense
        late = 0
        if self._under_way or plan.prefetch or plan.cpu or plan.fetch_hops or not self._plain:
            landed, copied, cpu_ready, late = self._move(plan, asked)
        elif plan.fetch:
            size = self._layout.nbytes[plan.fetch[0]]  # one layer, one part: one size
            landed = copied = self.links[0].demand_all(asked, size, len(plan.fetch))
        experts, cpu = self._costs.expert_ns(plan)
        end = landed + experts
        if plan.cpu:
            end = max(end, cpu_ready + cpu)
        if plan.evicted:
            self._evict(plan, end)
        if self._on_span is not None:
            self._show(plan, start, asked, landed, experts, cpu_ready, cpu)
        self.now = end
        return LayerTiming(start, dense, end - asked - experts, copied - asked, experts, end, late)

    def finish(self) -> int:
        """Let what is in flight or queued land; return the time at which all is quiet, in ns."""
        self._advance(1 << 62)
        frees = [link.free for link in chain(self.links, self.down)]
        return max(self.now, *chain.from_iterable(frees))

    def landed(self, slice_id: int) -> bool:
        """Return whether a planned-resident slice has arrived in the fastest tier."""
        self._advance(self.now)
        transfer = self._under_way.get(slice_id)
        return transfer is None or transfer.landed(self.now)

    def queued_bytes(self) -> int:
        """Return the bytes of prefetches that are queued or in flight towards the fastest tier."""
        self._advance(self.now)
        return sum(t.nbytes for t in self._under_way.values() if not t.landed(self.now))

    def cancel(self, slices: Sequence[int]) -> list[int]:
        """Withdraw the queued prefetches among *slices*; return those that had not started."""
        self._advance(self.now)
        withdrawn = []
        for s in slices:
            transfer = self._under_way.get(s)
            if transfer and transfer.start == UNSTARTED and transfer.hop == transfer.first:
                self.links[transfer.hop].queue.remove(transfer)
                del self._under_way[s]
                withdrawn.append(s)
        return withdrawn

    def _move(self, plan: LayerPlan, asked: int) -> tuple[int, int, int, int]:
        """Order a batch's copies; return when (all, the demanded, the CPU's) landed, and how many late.

        Demands are served in this order: prefetches that are promoted, fetches, slices for the CPU.
        """
        self._advance(asked)
        nbytes = self._layout.nbytes
        late = self._late(plan.needed, asked) if self._under_way else []
        demands = [t for t in late if t.start == UNSTARTED]
        for t in demands:
            t.demanded = True
            self.links[t.hop].queue.remove(t)
        hops = plan.fetch_hops or [1] * len(plan.fetch)
        fetched = [
            Transfer(s, nbytes[s], n - 1, asked, True)
            for s, n in zip(plan.fetch, hops, strict=True)
        ]
        demands += fetched
        for_cpu = [
            Transfer(s, nbytes[s], n, asked, True, last=1)
            for s, n in zip(plan.cpu, plan.cpu_hops or (), strict=False)
            if n
        ]
        demands += for_cpu
        ahead = plan.prefetch_hops or [1] * len(plan.prefetch)
        for s, n in zip(plan.prefetch, ahead, strict=True):
            transfer = self._under_way[s] = Transfer(s, nbytes[s], n - 1, asked, False)
            self.links[n - 1].enqueue(transfer)
        if demands:
            self._serve(demands)
        landed = max([asked, *[t.done for t in fetched], *[t.done for t in late]])
        copied = max([asked, *[t.done for t in demands]])
        cpu_ready = max([asked, *[t.done for t in for_cpu]])
        return landed, copied, cpu_ready, len(late)

    def _late(self, needed: Sequence[int], asked: int) -> list[Transfer]:
        """Take the prefetches of *needed* off the books; return those that have not landed."""
        asked_for = [self._under_way.pop(s) for s in needed if s in self._under_way]
        return [t for t in asked_for if not t.landed(asked)]

    def _serve(self, demands: list[Transfer]) -> None:
        """Carry demands up, link by link from the slowest, in the order they become ready."""
        for hop in reversed(range(len(self.links))):
            here = sorted(
                [t for t in demands if t.hop == hop and t.start == UNSTARTED], key=by_ready
            )
            for ready, group in groupby(here, key=by_ready):
                self._advance(ready, hop)
                self.links[hop].demand(ready, list(group))
            for t in here:
                t.hand_on()

    def _advance(self, to: int, slowest_to: int = 0) -> None:
        """Start the queued prefetches whose turn came before *to*, on links down to *slowest_to*."""
        for hop in range(len(self.links) - 1, slowest_to - 1, -1):
            for transfer in self.links[hop].advance(to):
                if transfer.hand_on():
                    self.links[transfer.hop].enqueue(transfer)

    def _evict(self, plan: LayerPlan, end: int) -> None:
        """Forget prefetches that left unasked, and start copying down what is demoted."""
        for s in plan.evicted if self._under_way else ():
            self._under_way.pop(s, None)
        if plan.demoted:
            nbytes = self._layout.nbytes
            self.down[0].demand(end, [Transfer(s, nbytes[s], 0, end, True) for s in plan.demoted])

    def _watch(self, label: str) -> OnStart | None:
        """Return a callback that shows a link's transfers, where somebody watches."""
        on_span, layout = self._on_span, self._layout
        if on_span is None:
            return None

        def show(transfer: Transfer, lane: int) -> None:
            s = transfer.slice_id
            cause = "demand" if transfer.demanded else "prefetch"
            info = {"cause": cause, "bytes": transfer.nbytes, "slice": s}
            name = f"{cause} L{layout.layer_of(s)} E{layout.expert_of(s)}"
            on_span(Span(f"link {label} lane {lane}", name, transfer.start, transfer.done, info))

        return show

    def _show(
        self,
        plan: LayerPlan,
        start: int,
        asked: int,
        landed: int,
        experts: int,
        cpu_ready: int,
        cpu: int,
    ) -> None:
        """Tell the observer what compute did in one batch, and how full the fastest tier is."""
        assert self._on_span is not None
        where = {"step": plan.batch.step, "layer": plan.batch.layer}
        spans = [
            ("compute", "dense", start, asked),
            ("compute", "wait", asked, landed),
            ("compute", "experts", landed, landed + experts),
            ("cpu", "experts", cpu_ready, cpu_ready + cpu),
        ]
        for lane, name, begin, end in spans:
            if end > begin:
                self._on_span(Span(lane, name, begin, end, where))
        level = {"bytes": plan.resident}
        self._on_span(Span(f"resident in {self._names[0]}", "bytes", landed, landed, level))
