"""This module moves slices into fast memory with threads, by the rules of a simulated link.

Each lane is a thread. A transfer that has started is never stopped; demands go ahead of queued
prefetches; a queued prefetch that is demanded is promoted, ahead of what is fetched with it. What
goes wrong in a thread is raised in the thread that waits for it. See `sim.machine.links`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Protocol

from moetier.sim.units import format_bytes
from moetier.validate.closing import Closing
from moetier.validate.machines.clock import Clock
from moetier.validate.machines.direct import aligned
from moetier.validate.machines.pacing import Pace, wait_until
from moetier.validate.machines.slots import Slot, SlotPool

UNSTARTED = -1


class Reader(Protocol):
    """Where slices come from; read by several threads at once."""

    @property
    def nbytes(self) -> Sequence[int]:
        """The bytes of each slice."""
        ...

    def read(self, slice_id: int, slot: Slot) -> None:
        """Read a slice into *slot*."""
        ...


class Transfer:
    """One slice on its way into memory. Times are in ns, `UNSTARTED` until they are known."""

    __slots__ = (
        "demanded", "done", "lane", "nbytes", "ready", "slice_id", "slot", "start", "unwanted",
    )  # fmt: skip

    def __init__(self, slice_id: int, nbytes: int, ready: int, demanded: bool) -> None:
        """Wait for a lane from time *ready* on."""
        self.slice_id, self.nbytes, self.ready, self.demanded = slice_id, nbytes, ready, demanded
        self.start = self.done = self.lane = UNSTARTED
        self.slot: Slot | None = None  # there once it has landed
        self.unwanted = False  # given up while in flight

    @property
    def landed(self) -> bool:
        """Return whether the slice is there."""
        return self.done != UNSTARTED


@dataclass(frozen=True, slots=True)
class Asked:
    """What became of the orders of one batch, at time *at*."""

    at: int
    late: list[Transfer]  # prefetches that were wanted and had not landed
    promoted: list[Transfer]  # those of them that had not even started
    fetched: list[Transfer]
    prefetched: list[Transfer]


class LaneSet(Closing):
    """Lanes that serve transfers from *reader*; use it as a context manager.

    All methods are for one thread, the one that computes.
    """

    def __init__(
        self,
        reader: Reader,
        lanes: int = 1,
        pace: Pace | None = None,
        *,
        clock: Clock | None = None,
        slots: SlotPool | None = None,
        on_landed: Callable[[Transfer], None] | None = None,
    ) -> None:
        """Start *lanes* threads, each held to *pace*; without one they read as fast as they can.

        *slots* default to memory for every slice there is. *on_landed* hears of every transfer, in
        the thread that made it and with the lock held, so it must be quick.
        """
        self.clock = clock or Clock()
        self.slots = slots or SlotPool(_room_for(reader.nbytes, lanes))
        self.overdue = 0  # paced transfers whose read alone took longer than the pace allows
        self.served = 0
        self._reader, self._pace, self._on_landed = reader, pace, on_landed
        self._demands: deque[Transfer] = deque()
        self._prefetches: OrderedDict[Transfer, None] = OrderedDict()
        self._change = Condition()
        self._busy = 0  # lanes
        self._ends = False
        self._error: BaseException | None = None
        self._threads = [
            Thread(target=self._serve, args=(lane,), name=f"moetier lane {lane}", daemon=True)
            for lane in range(lanes)
        ]
        for thread in self._threads:
            thread.start()

    def ask(
        self, wanted: Iterable[Transfer], fetch: Sequence[int], prefetch: Sequence[int] = ()
    ) -> Asked:
        """Order, in one moment, what a batch needs and what may come after.

        Args:
            wanted: Earlier prefetches that the batch needs; those that still wait are promoted.
            fetch: Slices to bring now.
            prefetch: Slices to queue behind everything.
        """
        nbytes = self._reader.nbytes
        with self._change:
            self._raise()
            at = self.clock.now()
            late = [t for t in wanted if not t.landed]
            promoted = [t for t in late if t.start == UNSTARTED]
            for t in promoted:
                del self._prefetches[t]
                t.demanded, t.ready = True, at
            fetched = [Transfer(s, nbytes[s], at, True) for s in fetch]
            prefetched = [Transfer(s, nbytes[s], at, False) for s in prefetch]
            self._demands.extend(promoted)
            self._demands.extend(fetched)
            self._prefetches.update(dict.fromkeys(prefetched))
            self._change.notify_all()
        return Asked(at, late, promoted, fetched, prefetched)

    def until(self, true: Callable[[], bool]) -> None:
        """Wait until *true* says so; it is asked with the lock held, whenever something landed.

        Raises:
            BaseException: What went wrong in a lane.
        """
        with self._change:
            self._raise()
            while not true():
                self._change.wait()
                self._raise()

    def wait(self, transfers: Sequence[Transfer]) -> None:
        """Wait until all *transfers* have landed; raises as `until` does."""
        if not all(t.landed for t in transfers):
            self.until(lambda: all(t.landed for t in transfers))

    def quiet(self) -> None:
        """Wait until nothing is queued or in flight; raises as `until` does."""
        self.until(lambda: not (self._busy or self._demands or self._prefetches))

    def withdraw(self, transfers: Iterable[Transfer]) -> list[Transfer]:
        """Take the queued prefetches among *transfers* back; return those that had not started."""
        with self._change:
            withdrawn = [t for t in transfers if t in self._prefetches]
            for t in withdrawn:
                del self._prefetches[t]
            return withdrawn

    def release(self, transfers: Iterable[Transfer]) -> int:
        """Give up the slices of *transfers*; return the bytes of prefetches that had not started.

        What is in flight lands, and its memory comes back then.
        """
        dropped = 0
        with self._change:
            for t in transfers:
                if t.slot is not None:
                    self.slots.give(t.slot)
                    t.slot = None
                elif t in self._prefetches:
                    del self._prefetches[t]
                    dropped += t.nbytes
                else:
                    t.unwanted = True
        return dropped

    def close(self) -> None:
        """End all threads; what is queued stays undone."""
        with self._change:
            self._ends = True
            self._demands.clear()
            self._prefetches.clear()
            self._change.notify_all()
        for thread in self._threads:
            thread.join()

    def _serve(self, lane: int) -> None:
        """Serve transfers until the end: what the thread of a lane does."""
        free = 0  # when this lane had done what it was given
        try:
            while (t := self._next(lane)) is not None:
                slot = self.slots.take(t.nbytes)
                self._reader.read(t.slice_id, slot)
                free = self._keep_pace(t, max(t.ready, free))
                self._land(t, slot)
        except BaseException as error:  # whatever it is, the thread that waits must hear of it
            with self._change:
                self._error = self._error or error
                self._ends = True
                self._change.notify_all()

    def _next(self, lane: int) -> Transfer | None:
        with self._change:
            while not self._ends:
                if self._demands:
                    t = self._demands.popleft()
                elif self._prefetches:
                    t, _ = self._prefetches.popitem(last=False)
                else:
                    self._change.wait()
                    continue
                t.start, t.lane = self.clock.now(), lane
                self._busy += 1
                return t
            return None

    def _keep_pace(self, t: Transfer, begin: int) -> int:
        """Wait until *t*, begun at *begin*, may land; return when the lane counts as free again.

        It begins when it was ready and the lane was free, not when the thread came to see that: so
        the delays of the thread do not add up, and the lane is as fast as was stated.
        """
        if self._pace is None:
            return 0
        deadline = begin + self._pace.ns(t.nbytes)
        now = self.clock.now()
        if now > deadline:
            with self._change:
                self.overdue += 1
            return now
        wait_until(deadline, self.clock.now, lambda: self._ends)
        return deadline

    def _land(self, t: Transfer, slot: Slot) -> None:
        with self._change:
            if t.unwanted:
                self.slots.give(slot)
            else:
                t.slot = slot
            t.done = self.clock.now()  # last: who sees it landed finds the slot
            self._busy -= 1
            self.served += 1
            if self._on_landed is not None:
                self._on_landed(t)
            self._change.notify_all()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def said_of_pace(pace: Pace | None, lane_sets: Iterable[LaneSet]) -> list[str]:
    """Return what a reader of the figures must know about the *pace* that *lane_sets* were held to.

    That is nothing where there was none.
    """
    if pace is None:
        return []
    return [
        f"each lane is held to {format_bytes(pace.rate)}/s after {pace.latency} ns, below what the "
        "disk gives",
        *(
            f"{lanes.overdue} of {lanes.served} transfers took longer than the pace allows"
            for lanes in lane_sets
            if lanes.overdue
        ),
    ]


def _room_for(nbytes: Sequence[int], lanes: int) -> int:
    return sum(map(aligned, nbytes)) + lanes * aligned(max(nbytes))
