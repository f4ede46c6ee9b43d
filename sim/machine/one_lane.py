"""This module moves slices over one unwatched lane: the copy engine of a GPU.

The rules are those of `machine.links` with one lane, where the order of transfers alone decides: a
queue is an ordered dictionary, a transfer a number. It gives the same times as `machine.fabric`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from moetier.sim.hardware import Link
from moetier.sim.layout import Layout
from moetier.sim.machine.fabric import Moved
from moetier.sim.plan import LayerPlan


class OneLane:
    """One link with one lane."""

    def __init__(self, link: Link, layout: Layout, overlap: bool = False) -> None:
        """Begin idle; with *overlap*, keep when each slice lands."""
        self.arrivals: dict[int, int] | None = {} if overlap else None
        self._took = {size: link.copy_ns(size, 1) for size in set(layout.nbytes)}
        self._nbytes, self._size = layout.nbytes, layout.size
        self._plain = layout.n_parts == 1
        self._free = self._busy = 0
        self._queue: OrderedDict[int, int] = OrderedDict()  # slice -> ready, in order of arrival
        self._done: dict[int, int] = {}  # prefetches that started and nobody asked for yet

    def move(self, plan: LayerPlan, asked: int) -> Moved:
        """Order the copies of *plan* at time *asked*."""
        queue, done, arrivals = self._queue, self._done, self.arrivals
        landed = copied = asked
        if arrivals is not None:
            arrivals.clear()
        late = 0
        if not queue and not done and not plan.prefetch:
            if plan.fetch:
                landed = copied = self._copy(plan.fetch, asked)
            return landed, copied, asked, 0
        if queue:
            self._advance(asked)
        if done:
            done = self._under_way(asked)
            for s in plan.needed if done else ():
                if s in done:
                    late += 1
                    end = done.pop(s)
                    landed = max(landed, end)
                    if arrivals is not None:
                        arrivals[s] = end
        if queue:
            promoted = [s for s in plan.needed if s in queue]
            if promoted:
                late += len(promoted)
                for s in promoted:
                    del queue[s]
                copied = self._copy(promoted, asked)
        if plan.fetch:
            copied = self._copy(plan.fetch, asked)
        if plan.prefetch:
            for s in plan.prefetch:
                queue[s] = asked
        return max(landed, copied), copied, asked, late

    def drop(self, slices: Sequence[int], now: int) -> int:
        """Give up *slices*, which leave the top; return the bytes of prefetches dropped."""
        if not self._queue and not self._done:
            return 0
        self._advance(now)
        queue, done, dropped = self._queue, self._done, 0
        for s in slices:
            if s in queue:
                del queue[s]
                dropped += self._nbytes[s]
            elif s in done:
                del done[s]
        return dropped

    def demote(self, slices: Sequence[int], now: int) -> None:
        """Copy nothing down: exclusive tiers have more than one link."""
        raise NotImplementedError

    def landed(self, slice_id: int, now: int) -> bool:
        """Return whether a planned-resident slice has arrived in the fastest tier."""
        self._advance(now)
        return slice_id not in self._queue and self._done.get(slice_id, 0) <= now

    def queued_bytes(self, now: int) -> int:
        """Return the bytes of prefetches that are queued or in flight towards the fastest tier."""
        if self._queue:
            self._advance(now)
        left = self._size(self._queue) if self._queue else 0
        return left + self._size(self._under_way(now)) if self._done else left

    def cancel(self, slices: Sequence[int], now: int) -> list[int]:
        """Withdraw the queued prefetches among *slices*; return those that had not started."""
        self._advance(now)
        withdrawn = [s for s in slices if s in self._queue]
        for s in withdrawn:
            del self._queue[s]
        return withdrawn

    def finish(self) -> int:
        """Let everything land; return the time at which the link falls idle."""
        self._advance(1 << 62)
        return self._free

    def busy(self) -> list[int]:
        """Return the busy time of the link in ns."""
        return [self._busy]

    def _copy(self, slices: Sequence[int], at: int) -> int:
        """Serve demanded *slices* of one layer ahead of the queue; return when the last lands."""
        if self._plain:  # one layer, one part: one size
            took = len(slices) * self._took[self._nbytes[slices[0]]]
        else:
            took = sum([self._took[self._nbytes[s]] for s in slices])
        self._busy += took
        begin = max(at, self._free)
        if self.arrivals is not None:
            end = begin
            for s in slices:
                end += self._took[self._nbytes[s]]
                self.arrivals[s] = end
        self._free = begin + took
        return self._free

    def _under_way(self, now: int) -> dict[int, int]:
        """Forget what has landed, which is resident like any other; return the rest of `_done`."""
        if self._free <= now:
            self._done.clear()
        else:
            self._done = {s: end for s, end in self._done.items() if end > now}
        return self._done

    def _advance(self, to: int) -> None:
        """Start the queued prefetches whose turn came before *to*."""
        queue, nbytes, took = self._queue, self._nbytes, self._took
        while queue:
            s, ready = next(iter(queue.items()))
            begin = max(self._free, ready)
            if begin >= to:
                return
            del queue[s]
            cost = took[nbytes[s]]
            self._busy += cost
            self._free = self._done[s] = begin + cost
