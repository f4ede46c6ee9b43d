"""This module keeps the time of one link: lanes that serve transfers, demand before prefetch.

Nothing here ticks. A link knows when each lane will be free and which prefetches wait; `advance`
starts those that began before a given time. That is exact because only two things can happen to a
link from outside, a demand and a prefetch that joins the queue, and both first advance it to their
own time.

Rules: a transfer that has started is never stopped. A demand goes ahead of every queued prefetch,
also of one that could start in the same nanosecond. A transfer's rate is fixed when it starts, by
the number of lanes busy from then on. Idle lanes are given out to one group after the other: the
demands of one batch that became ready together, then those ready next, then all prefetches that are
ready; the members of a group that start together count each other and who started before, not the
groups behind. A queued prefetch that is demanded becomes ready at that time, and goes first in the
group. A queued prefetch whose slice has left the plan has nowhere to land: it goes no further than
the tier below, and is dropped where it would only have gone on.

Within one nanosecond copies land first; then batches end, ask, cancel and evict; then lanes are
given out. So what could start at the very time of a cancellation has not started.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice, takewhile
from operator import attrgetter

from moetier.sim.hardware import Link as LinkSpec

UNSTARTED = -1
NEVER = 1 << 62


class Transfer:
    """One slice on its way up, over one link after the other."""

    __slots__ = ("demanded", "done", "first", "hop", "last", "nbytes", "ready", "slice_id", "start")

    def __init__(
        self, slice_id: int, nbytes: int, hop: int, ready: int, demanded: bool, last: int = 0
    ) -> None:
        """Wait for link *hop* from time *ready* on, to travel up to and over link *last*.

        Link 0 ends in the fastest tier, link 1 in the one below it. `start` and `done` are those of
        the current hop, `UNSTARTED` while it waits.
        """
        self.slice_id, self.nbytes, self.ready, self.demanded = slice_id, nbytes, ready, demanded
        self.hop = self.first = hop
        self.last = last
        self.start = self.done = UNSTARTED

    def hand_on(self) -> bool:
        """Move on to the next link, ready when this hop is done; return False at the last."""
        if self.hop == self.last:
            return False
        self.hop -= 1
        self.ready, self.start, self.done = self.done, UNSTARTED, UNSTARTED
        return True

    def landed(self, at: int) -> bool:
        """Return whether the whole way is done by time *at*."""
        return self.hop == self.last and UNSTARTED < self.done <= at


OnStart = Callable[[Transfer, int], None]  # the transfer and its lane
by_ready = attrgetter("ready")


class LinkTime:
    """The lanes of one link, and the prefetches that wait for them."""

    __slots__ = ("_carried", "_cost", "_on_start", "_spec", "busy", "free", "queue")

    def __init__(
        self, spec: LinkSpec, on_start: OnStart | None = None, remember: bool = False
    ) -> None:
        """Begin idle at time 0; *on_start* hears of every transfer that starts.

        *remember* when transfers run, so that `occupied` can say.
        """
        self._spec, self._on_start = spec, on_start
        self.free = [0] * spec.lanes  # when each lane has finished what it was given
        # Waiting prefetches by ready time, then by arrival; any can leave at once.
        self.queue: OrderedDict[Transfer, None] = OrderedDict()
        self.busy = 0  # ns, summed over lanes
        self._cost: dict[tuple[int, int], int] = {}
        self._carried: list[tuple[int, int]] | None = [] if remember else None  # by start

    def copy_ns(self, nbytes: int, active: int) -> int:
        """Return how long a transfer takes while *active* lanes are busy."""
        found = self._cost.get((nbytes, active))
        if found is None:
            found = self._cost[nbytes, active] = self._spec.copy_ns(nbytes, active)
        return found

    def demand(self, at: int, transfers: list[Transfer]) -> None:
        """Start *transfers*, all ready at *at*, ahead of the queue; the link has been advanced."""
        lanes, first = self.free, 0
        while first < len(transfers):
            now = max(at, min(lanes))
            first += self._start(now, transfers[first:])

    def enqueue(self, transfer: Transfer) -> None:
        """Queue a prefetch behind all that are ready no later."""
        queue = self.queue
        unordered = bool(queue) and next(reversed(queue)).ready > transfer.ready
        queue[transfer] = None
        if unordered:  # two lanes of the link before have overtaken each other
            self.queue = OrderedDict.fromkeys(sorted(queue, key=by_ready))

    def withdraw(self, transfer: Transfer) -> None:
        """Take a prefetch that has not started out of the queue."""
        del self.queue[transfer]

    def advance(self, to: int) -> Iterable[Transfer]:
        """Start every queued prefetch whose turn came before *to*; return them."""
        if not self.queue:
            return ()
        started: list[Transfer] = []
        while self.queue:
            now = max(min(self.free), next(iter(self.queue)).ready)
            if now >= to:
                break
            ready = takewhile(lambda t: t.ready <= now, self.queue)  # noqa: B023  (used at once)
            group = list(islice(ready, len(self.free)))
            for transfer in group[: self._start(now, group)]:
                del self.queue[transfer]
                started.append(transfer)
        return started

    def next_start(self) -> int:
        """Return when the next queued prefetch would start, `NEVER` where none waits."""
        if not self.queue:
            return NEVER
        return max(min(self.free), next(iter(self.queue)).ready)

    def occupied(self, at: int) -> tuple[bool, int]:
        """Return whether a transfer runs at time *at*, and until when that stays so.

        As far as started transfers tell; times asked for must not go back.
        """
        assert self._carried is not None
        self._carried = [span for span in self._carried if span[1] > at]
        until = at
        for start, done in self._carried:
            if start > until:
                return (True, until) if until > at else (False, start)
            until = max(until, done)
        return (True, until) if until > at else (False, NEVER)

    def _start(self, now: int, waiting: list[Transfer]) -> int:
        """Give idle lanes to the first of *waiting*; return how many started."""
        lanes = self.free
        idle = [lane for lane, free in enumerate(lanes) if free <= now][: len(waiting)]
        active = len(idle) + sum(free > now for free in lanes)
        for lane, transfer in zip(idle, waiting, strict=False):
            took = self.copy_ns(transfer.nbytes, active)
            transfer.start, transfer.done = now, now + took
            lanes[lane] = now + took
            self.busy += took
            if self._carried is not None:
                self._carried.append((now, now + took))
            if self._on_start is not None:
                self._on_start(transfer, lane)
        return len(idle)
