"""This module keeps slices in fast memory as plans say: what all real machines share.

What differs is where slices come from, a file (`disk`) or memory of the host (`cuda`), and who
computes: random weights of the true size (`trace_machine`), or a model that runs (`live_machine`).
Warm-up costs no time in a simulation; here a slice that warm-up made resident is brought when it is
first needed, with the clock stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from moetier.sim.layout import Layout
from moetier.sim.machine.base import LayerTiming, OnSpan
from moetier.sim.machine.hierarchy import Hierarchy
from moetier.sim.plan import LayerPlan
from moetier.traces.errors import InputError
from moetier.validate.closing import Closing
from moetier.validate.machines.clock import Clock
from moetier.validate.machines.direct import aligned
from moetier.validate.machines.lanes import Asked, LaneSet, Reader, Transfer
from moetier.validate.machines.pacing import Pace
from moetier.validate.machines.slots import Slot, SlotPool
from moetier.validate.machines.spans import Piece, Timeline


class Store(Reader, Protocol):
    """Where all slices of a run lie."""

    def read_aside(self, slice_id: int) -> Slot:
        """Return a slice in memory of its own, beside all slots."""
        ...

    def check_layout(self, layout: Layout) -> None:
        """Raise `InputError` unless it holds exactly the slices of *layout*."""
        ...


class SlotTier(Closing):
    """Slots over a store of slices; close it after use. `now` is the end of the last batch."""

    def __init__(
        self,
        store: Store,
        hierarchy: Hierarchy,
        layout: Layout,
        on_span: OnSpan | None = None,
        *,
        lanes: int | None = None,
        pace: Pace | None = None,
        slot_bytes: int | None = None,
        pool: Callable[[int], SlotPool] = SlotPool,
    ) -> None:
        """Get ready; the arguments are those of `DiskMachine`, and so are the errors.

        *pool* makes the slots, given how many bytes they may take.
        """
        if len(hierarchy.links) != 1:
            raise InputError(
                f"a real machine has two tiers, not {len(hierarchy.names)}",
                where="tiers",
                way_out="name the memory that computes and the one below it",
            )
        store.check_layout(layout)
        self.now = 0
        self.lanes_used = lanes or hierarchy.links[0].lanes
        self._layout, self._overlap = layout, hierarchy.overlap
        self._below = hierarchy.names[1]
        self._store = store
        if slot_bytes is None:
            slot_bytes = slots_for(layout, layout.total_bytes, self.lanes_used)
        self.slots = pool(slot_bytes)
        try:
            if layout.each:
                self.slots.reserve(layout.each, len(layout.nbytes) + self.lanes_used)
        except BaseException:
            self.slots.close()
            raise
        self._timeline = Timeline(on_span, layout, hierarchy) if on_span is not None else None
        self._held: dict[int, Transfer] = {}  # planned to be in memory
        self._under_way: dict[int, Transfer] = {}  # prefetched and not asked for yet
        self._began = False
        self._clock = Clock()
        self.lanes = LaneSet(
            store,
            self.lanes_used,
            pace,
            clock=self._clock,
            slots=self.slots,
            on_landed=self._timeline.landed if self._timeline else None,
        )

    def wake(self) -> None:
        """Begin to count time, if that has not happened yet."""
        if not self._began:
            self._began = True
            self._clock.restart()

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
        self.slots.close()

    def _clear(self, plan: LayerPlan) -> int:
        """Make room for *plan*, and bring what is warm; return the bytes of prefetches dropped.

        Memory of what the batch will evict is given back at once, where it is not needed. That
        changes no time: only what is queued or in flight has to be there until the end.

        Raises:
            InputError: If the plan wants what no lower tier can do.
        """
        if plan.cpu:
            raise InputError(
                f"nothing computes from '{self._below}' on a real machine",
                where="policy.miss",
                way_out="use `miss: fetch`",
            )
        self.wake()
        dropped = self._forget(plan.replaced)
        needed = set(plan.needed)
        self._forget([s for s in plan.evicted if s not in needed and self._is_here(s)])
        self._bring_warm(plan)
        return dropped

    def _order(self, plan: LayerPlan) -> Asked:
        """Order what *plan* needs and what may come after."""
        asked = self.lanes.ask(
            [self._under_way.pop(s) for s in plan.needed if s in self._under_way],
            plan.fetch,
            plan.prefetch,
        )
        for t in asked.prefetched:
            self._held[t.slice_id] = self._under_way[t.slice_id] = t
        for t in asked.fetched:
            self._held[t.slice_id] = t
        return asked

    def _end(
        self, plan: LayerPlan, start: int, asked: Asked, pieces: Sequence[Piece], dropped: int
    ) -> LayerTiming:
        """Forget what *plan* evicts, and return when the parts of the batch happened."""
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
                self._store.read(s, t.slot)
                t.start = t.done = self.now

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
