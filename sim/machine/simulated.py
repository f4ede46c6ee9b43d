"""This module performs plans in virtual time: integer nanoseconds, no clock, no randomness.

Compute runs one batch after the other; the links are a `Fabric`, brought up to date when something
happens to it. `machine.processes` states the same rules as SimPy processes, one event at a time;
both give the same records, which is a test.

In the plain case the experts of a batch are one piece of compute that begins when all slices have
landed. With overlap each expert is a piece, in the order in which their last slices landed
(resident ones first, ties in plan order); the overhead of the call goes with the first.
"""

from __future__ import annotations

from collections.abc import Sequence

from moetier.sim.layout import Layout
from moetier.sim.machine.base import LayerTiming, OnSpan, Span
from moetier.sim.machine.contention import Contention
from moetier.sim.machine.costs import Costs
from moetier.sim.machine.fabric import Fabric, Links
from moetier.sim.machine.hierarchy import Hierarchy
from moetier.sim.machine.one_lane import OneLane
from moetier.sim.plan import LayerPlan

Piece = tuple[str, int, int]  # of compute: its name, when it began and when it ended


class SimMachine:
    """One machine's tiers, links and compute, from time 0 on."""

    def __init__(
        self, hierarchy: Hierarchy, costs: Costs, layout: Layout, on_span: OnSpan | None = None
    ) -> None:
        """Begin idle; *on_span* hears of everything that occupies compute or a link."""
        self.now = 0
        self._on_span, self._fast = on_span, hierarchy.names[0]
        self._dense_ns, self._expert_ns = costs.dense_ns, costs.expert_ns
        self._per_expert, self._overlap = costs.per_expert, hierarchy.overlap
        self._contention: Contention | None = None
        one_lane = len(hierarchy.links) == 1 and hierarchy.links[0].lanes == 1
        self.fabric: Fabric
        if one_lane and on_span is None and not hierarchy.slowdown:
            self.fabric = OneLane(hierarchy.links[0], layout, hierarchy.overlap)
        else:
            self.fabric = links = Links(hierarchy, layout, on_span)
            if hierarchy.slowdown:
                self._contention = Contention(hierarchy.slowdown, links.occupied)
        self._plain = not hierarchy.overlap and not hierarchy.slowdown
        self._move = self.fabric.move

    def execute(self, plan: LayerPlan) -> LayerTiming:
        """Perform one batch and return when its parts happened."""
        start = self.now
        dense = self._dense_ns(plan.batch)
        dropped = self.fabric.drop(plan.replaced, start) if plan.replaced else 0
        asked = start + dense if self._contention is None else self._end_of(start, dense)
        landed, copied, cpu_ready, late = self._move(plan, asked)
        experts, cpu = self._expert_ns(plan)
        computed: list[Piece] | None = None
        if self._plain:
            end = landed + experts
            if self._on_span is not None:
                computed = [("experts", landed, end)]
        else:
            computed = self._compute(plan, asked, landed, experts)
            end = max(landed, computed[-1][2]) if computed else landed
            experts = sum([done - begin for _, begin, done in computed])
        if plan.cpu:
            end = max(end, cpu_ready + cpu)
        if plan.evicted:
            dropped += self.fabric.drop(plan.evicted, end)
        if plan.demoted:
            self.fabric.demote(plan.demoted, end)
        if self._on_span is not None and computed is not None:
            self._show(self._on_span, plan, (start, asked, landed), computed, cpu_ready, cpu)
        self.now = end
        return LayerTiming(
            start, asked - start, end - asked - experts, copied - asked, experts, end, late, dropped
        )

    def _compute(self, plan: LayerPlan, asked: int, landed: int, total: int) -> list[Piece]:
        """Return the pieces of the experts' compute as they ran: name, begin and end of each."""
        pieces: list[tuple[int, str, int]] = [(landed, "experts", total)]  # ready, name, ns
        if self._overlap:
            arrivals = self.fabric.arrivals or {}
            overhead, parts = self._per_expert(plan, total)
            pieces = [
                (
                    max([arrivals.get(s, asked) for s in part.slices]),
                    f"expert {part.expert}",
                    part.ns,
                )
                for part in parts
            ]
            pieces.sort(key=lambda piece: piece[0])
            if pieces:
                ready, name, ns = pieces[0]
                pieces[0] = ready, name, ns + overhead
        ran, free = [], asked
        for ready, name, ns in pieces:
            begin = max(ready, free)
            free = self._end_of(begin, ns)
            ran.append((name, begin, free))
        return ran

    def _end_of(self, begin: int, ns: int) -> int:
        return begin + ns if self._contention is None else self._contention.end_of(begin, ns)

    def finish(self) -> int:
        """Let what is in flight or queued land; return the time at which all is quiet, in ns."""
        return max(self.now, self.fabric.finish())

    def landed(self, slice_id: int) -> bool:
        """Return whether a planned-resident slice has arrived in the fastest tier."""
        return self.fabric.landed(slice_id, self.now)

    def queued_bytes(self) -> int:
        """Return the bytes of prefetches that are queued or in flight towards the fastest tier."""
        return self.fabric.queued_bytes(self.now)

    def cancel(self, slices: Sequence[int]) -> list[int]:
        """Withdraw the queued prefetches among *slices*; return those that had not started."""
        return self.fabric.cancel(slices, self.now)

    def _show(
        self,
        on_span: OnSpan,
        plan: LayerPlan,
        edges: tuple[int, int, int],
        computed: list[Piece],
        cpu_ready: int,
        cpu: int,
    ) -> None:
        """Tell the observer what compute did in one batch, and how full the fastest tier is.

        *edges* are the times at which the dense part began and ended and the last slice landed;
        *computed* has the pieces of the experts' compute.
        """
        where = {"step": plan.batch.step, "layer": plan.batch.layer}
        start, asked, landed = edges
        spans = [("compute", "dense", start, asked)]
        for name, begin, end in computed:
            spans += [("compute", "wait", asked, begin), ("compute", name, begin, end)]
            asked = end
        spans.append(("cpu", "experts", cpu_ready, cpu_ready + cpu))
        for lane, name, begin, end in spans:
            if end > begin:
                on_span(Span(lane, name, begin, end, where))
        level = {"bytes": plan.resident}
        on_span(Span(f"resident in {self._fast}", "bytes", landed, landed, level))
