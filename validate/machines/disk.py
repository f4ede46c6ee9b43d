"""This module performs plans on a disk, memory and a CPU: a machine whose time is real.

It mirrors `sim.machine.simulated` step by step: the dense part, then the copies in the order of a
link's rules, the wait, the experts, and at the end what has left the plan is forgotten. A batch
begins when the one before ended, so what the host program does in between, the planner included, is
part of the dense part, as the host time per layer of a profile is.

Warm-up costs no time in a simulation. Here a slice that warm-up made resident is read when it is
first needed, with the clock stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

from torch import Tensor

from moetier.sim.layout import Layout
from moetier.sim.machine.base import LayerTiming, OnSpan
from moetier.sim.machine.costs import Costs
from moetier.sim.machine.hierarchy import Hierarchy
from moetier.sim.plan import LayerPlan
from moetier.sim.policy.base import Precision
from moetier.traces.batch import LayerBatch
from moetier.traces.errors import InputError
from moetier.validate.machines.clock import Clock
from moetier.validate.machines.dense import Dense
from moetier.validate.machines.direct import aligned
from moetier.validate.machines.experts import Experts, Kernel, RandomHidden, Routed, WholeKernel
from moetier.validate.machines.lanes import LaneSet, Transfer
from moetier.validate.machines.pacing import Pace
from moetier.validate.machines.slices_file import SlicesFile
from moetier.validate.machines.slots import SlotPool
from moetier.validate.machines.spans import Piece, Timeline

Hidden = Callable[[LayerBatch], Tensor]
"""From a batch to the hidden states that enter its layer, (T, H)."""


class DiskMachine:
    """A `Machine` that reads slices from a file and computes on the CPU; close it after use.

    `output` holds what the experts of the last batch added up to, (T, H).
    """

    def __init__(
        self,
        file: SlicesFile,
        hierarchy: Hierarchy,
        costs: Costs,
        layout: Layout,
        on_span: OnSpan | None = None,
        *,
        lanes: int | None = None,
        pace: Pace | None = None,
        slot_bytes: int | None = None,
        context: int = 0,
        kernel: Kernel | None = None,
        precision: Precision | None = None,
        hidden: Hidden | None = None,
        seed: int = 0,
    ) -> None:
        """Get ready; time begins with the first batch.

        Args:
            file: The slices; it stays the caller's to close.
            hierarchy: Two tiers, and the link between them.
            costs: What the dense part counts.
            layout: The slices of the run, which must be those of the file.
            on_span: Hears of what occupied compute and lanes, in the calling thread.
            lanes: Threads that read; by default as many as the link has lanes.
            pace: What each lane is held to; without one it reads as fast as it can.
            slot_bytes: Memory for slices; by default room for all of them.
            context: Most key/value entries of a batch, to make room beforehand.
            kernel: Computes an expert; by default whole experts as plain matrices.
            precision: That of the running policy, which knows the level and the channels of each
                token; without one all are alike.
            hidden: Gives the hidden states; by default random ones.
            seed: Of dense weights and hidden states.

        Raises:
            InputError: If the file does not fit the run, there are more than two tiers, or the
                memory does not suffice.
        """
        if len(hierarchy.links) != 1:
            raise InputError(
                f"the disk machine has two tiers, not {len(hierarchy.names)}",
                where="tiers",
                way_out="name the memory and the disk",
            )
        file.check_layout(layout)
        geometry, weights = file.index.geometry, file.index.weights
        self.now = 0
        self.output: Tensor | None = None
        self.lanes_used = lanes or hierarchy.links[0].lanes
        self._layout, self._overlap = layout, hierarchy.overlap
        self._experts = Experts(kernel or WholeKernel(geometry, weights), precision)
        self.dense = Dense(costs.dense, geometry, weights, context=context, seed=seed)
        self._hidden = hidden or RandomHidden(self.dense.hidden, self._experts.kernel.dtype, seed)
        self._file = file
        if slot_bytes is None:
            slot_bytes = slots_for(layout, layout.total_bytes, self.lanes_used)
        self.slots = SlotPool(slot_bytes)
        if layout.each:
            self.slots.reserve(layout.each, len(layout.nbytes) + self.lanes_used)
        self._timeline = Timeline(on_span, layout, hierarchy) if on_span is not None else None
        self._held: dict[int, Transfer] = {}  # planned to be in memory
        self._under_way: dict[int, Transfer] = {}  # prefetched and not asked for yet
        self._began = False
        self._clock = Clock()
        self.lanes = LaneSet(
            file,
            self.lanes_used,
            pace,
            clock=self._clock,
            slots=self.slots,
            on_landed=self._timeline.landed if self._timeline else None,
        )

    def execute(self, plan: LayerPlan) -> LayerTiming:
        """Perform one batch and return when its parts happened.

        Raises:
            InputError: If the file was cut short, changed or removed, memory ran out, or the plan
                wants what this machine cannot do.
        """
        if plan.cpu:
            raise InputError(
                "nothing computes from the disk", where="policy.miss", way_out="use `miss: fetch`"
            )
        if not self._began:
            self._began = True
            self._clock.restart()
        start = self.now
        dropped = self._forget(plan.replaced)
        self._make_room(plan)
        self._bring_warm(plan)
        x = self._hidden(plan.batch)
        self.dense.run(plan.batch, x.to(self.dense.dtype))
        asked = self.lanes.ask(
            [self._under_way.pop(s) for s in plan.needed if s in self._under_way],
            plan.fetch,
            plan.prefetch,
        )
        for t in asked.prefetched:
            self._held[t.slice_id] = self._under_way[t.slice_id] = t
        for t in asked.fetched:
            self._held[t.slice_id] = t
        pieces = self._compute(plan, x, asked.fetched + asked.late, asked.at)
        end = pieces[-1].end if pieces else self._clock.now()
        dropped += self._forget(plan.evicted)
        experts = sum(piece.end - piece.begin for piece in pieces)
        copied = max([asked.at, *[t.done for t in asked.promoted + asked.fetched]])
        self.now = end
        if self._timeline is not None:
            self._timeline.show(plan, start, asked.at, pieces)
        return LayerTiming(
            start,
            asked.at - start,
            end - asked.at - experts,
            copied - asked.at,
            experts,
            end,
            len(asked.late),
            dropped,
        )

    def finish(self) -> int:
        """Let what is in flight or queued land; return the time at which all is quiet, in ns."""
        self.lanes.quiet()
        if self._timeline is not None:
            self._timeline.show_transfers()
        return self._clock.now()

    def landed(self, slice_id: int) -> bool:
        """Return whether a planned-resident slice has arrived in memory."""
        transfer = self._under_way.get(slice_id)
        return transfer is None or transfer.landed

    def queued_bytes(self) -> int:
        """Return the bytes of prefetches that are queued or in flight."""
        return sum(t.nbytes for t in self._under_way.values() if not t.landed)

    def cancel(self, slices: Sequence[int]) -> list[int]:
        """Withdraw the queued prefetches among *slices*; return those that had not started."""
        waiting = [self._under_way[s] for s in slices if s in self._under_way]
        withdrawn = [t.slice_id for t in self.lanes.withdraw(waiting)]
        for s in withdrawn:
            del self._under_way[s], self._held[s]
        return withdrawn

    def close(self) -> None:
        """End all threads and let go of the memory; closing twice does nothing."""
        self.lanes.close()
        self._held.clear()
        self._under_way.clear()

    def __enter__(self) -> DiskMachine:
        """Use the machine."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def _compute(
        self, plan: LayerPlan, x: Tensor, copies: list[Transfer], asked: int
    ) -> list[Piece]:
        """Wait for *copies* and compute the experts; return the pieces of compute as they ran.

        Without overlap that is one piece. With it each expert is one, in the order in which their
        last slices landed (resident ones first, ties in plan order).
        """
        experts = self._parts(plan)
        routed = self._experts.routed(plan.batch, experts, plan.degrade)
        outputs: dict[int, Tensor] = {}
        pieces: list[Piece] = []
        if not self._overlap:
            self.lanes.wait(copies)
        name, waiting, now = "experts", dict(experts), self._clock.now
        begin = now()
        while waiting:
            expert = self._next_ready(waiting, asked) if self._overlap else min(waiting)
            if self._overlap:
                name, begin = f"expert {expert}", now()
            outputs[expert] = self._run(waiting.pop(expert), routed[expert], x)
            if self._overlap and waiting:
                pieces.append(Piece(name, begin, now()))
        self.output = self._experts.add_up(outputs, routed, x)
        if experts:
            pieces.append(Piece(name, begin, now()))
        return pieces

    def _parts(self, plan: LayerPlan) -> dict[int, list[Transfer | None]]:
        """Return the parts of each expert that is computed; None for what compute does without."""
        layout, without = self._layout, set(plan.degrade)
        away = without.union(plan.skip)
        found: dict[int, list[Transfer | None]] = {}
        for s in plan.needed:
            if s not in away:
                expert = layout.expert_of(s)
                parts = found.setdefault(expert, [None] * layout.n_parts)
                parts[layout.part_of(s)] = self._held[s]
        return found

    def _run(self, parts: list[Transfer | None], routed: Routed, x: Tensor) -> Tensor:
        slots = [None if t is None else t.slot for t in parts]
        return self._experts.run(slots, routed, x)

    def _next_ready(self, waiting: dict[int, list[Transfer | None]], asked: int) -> int:
        """Wait until one of the experts *waiting* is all there; return the one that came first."""

        def there() -> list[tuple[int, int]]:
            return [
                (max([asked, *[t.done for t in parts if t is not None]]), expert)
                for expert, parts in waiting.items()
                if all(t is None or t.landed for t in parts)
            ]

        self.lanes.until(lambda: bool(there()))
        return min(there(), key=lambda found: found[0])[1]

    def _bring_warm(self, plan: LayerPlan) -> None:
        """Read what *plan* needs and warm-up made resident, while the clock stands still."""
        away = {*plan.fetch, *plan.skip, *plan.degrade}
        warm = [s for s in plan.needed if s not in self._held and s not in away]
        if not warm:
            return
        with self._clock.stopped():
            for s in warm:
                t = self._held[s] = Transfer(s, self._layout.nbytes[s], self.now, False)
                t.slot = self.slots.take(t.nbytes)
                self._file.read(s, t.slot)
                t.start = t.done = self.now

    def _make_room(self, plan: LayerPlan) -> None:
        """Give the memory of what the batch will evict back at once, where it is not needed.

        That changes no time: only what is queued or in flight has to be there until the end.
        """
        needed = set(plan.needed)
        self._forget([s for s in plan.evicted if s not in needed and self._is_here(s)])

    def _is_here(self, slice_id: int) -> bool:
        return slice_id in self._held and self._held[slice_id].landed

    def _forget(self, slices: Sequence[int]) -> int:
        """Let go of *slices*, which left the plan; return the bytes of prefetches dropped."""
        if not slices:
            return 0
        for s in slices:
            self._under_way.pop(s, None)
        return self.lanes.release([self._held.pop(s) for s in slices if s in self._held])


def slots_for(layout: Layout, capacity: int, lanes: int) -> int:
    """Return the bytes of slots that a cache of *capacity* bytes may come to need.

    That is the cache, the largest batch (all experts of a layer), and what is in flight for nobody,
    each slice in whole pages.
    """
    sizes = [aligned(n) for n in layout.nbytes]
    rounded = max(size / max(n, 1) for size, n in zip(sizes, layout.nbytes, strict=True))
    layers = range(0, len(sizes), layout.layer_slices)
    batch = max(sum(sizes[at : at + layout.layer_slices]) for at in layers)
    return min(int(capacity * rounded) + batch, sum(sizes)) + (lanes + 1) * max(sizes)
