"""This module is a device made of threads and memory, to run the CUDA machine where there is none.

Every stream is a thread that really copies, in the order in which it was asked to, and then waits
until a stated rate is kept. What torch computes runs at once in the calling thread, as on a device
that is as fast as its launches. It can have too little memory, and copies can fail. Nothing that is
timed on it says anything about a GPU; its name says so wherever a profile or report shows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Condition, Lock, Thread
from time import perf_counter_ns

import torch
from torch import Tensor

from moetier.validate.identity import identity
from moetier.validate.machines.cuda.device import FACTS, Event, Stream, require
from moetier.validate.machines.pacing import Pace, wait_until

NAME = "fake device (threads on the CPU; not a GPU)"
WATTS = 50  # of its made-up counter


class FakeDevice:
    """A device of *device_bytes*, and *pinned_bytes* of the host; both counted, so leaks show.

    *pace* is that of each stream, for copies in either direction. *fails* is asked before each
    copy, from 0 on; what it returns is raised where somebody waits for that copy. *counts_energy*
    makes up a counter: the wall clock at `WATTS`.
    """

    name = NAME
    torch = torch.device("cpu")

    def __init__(
        self,
        *,
        device_bytes: int = 1 << 30,
        pinned_bytes: int = 1 << 30,
        pace: Pace | None = None,
        fails: Callable[[int], BaseException | None] = lambda _: None,
        counts_energy: bool = False,
        energy_window: int = 1_000_000_000,
    ) -> None:
        """Begin with all memory free."""
        self.energy_window = energy_window
        self.copies = 0  # that were begun
        self._room = {"device": device_bytes, "host": pinned_bytes}
        self._lent: dict[int, tuple[str, Tensor]] = {}  # by address
        self._pace, self._fails, self._counts = pace, fails, counts_energy
        self._lock = Lock()
        self._streams: list[FakeStream] = []

    def identity(self) -> Mapping[str, str]:
        """Return what this machine says, and that there is no GPU."""
        return identity(FACTS) | {"gpu": NAME}

    def memory(self, nbytes: int) -> Tensor:
        """Return memory; see `Device`."""
        return self._lend("device", nbytes)

    def pinned(self, nbytes: int) -> Tensor:
        """Return memory; see `Device`."""
        return self._lend("host", nbytes)

    def release(self, memory: Tensor) -> None:
        """Take *memory* back."""
        with self._lock:
            place, mine = self._lent.pop(memory.data_ptr())
            self._room[place] += mine.numel()

    def free(self) -> int:
        """Return the bytes of the device that are left."""
        return self._room["device"]

    def free_pinned(self) -> int:
        """Return the bytes of the host that are left."""
        return self._room["host"]

    @property
    def lent(self) -> int:
        """Return the bytes that nobody has given back, of device and host together."""
        return sum(memory.numel() for _, memory in self._lent.values())

    def stream(self) -> Stream:
        """Return a new stream: a thread."""
        made = FakeStream(self._begin, self._pace, len(self._streams))
        self._streams.append(made)
        return made

    def energy(self) -> int | None:
        """Return the wall clock as microjoules, if it counts."""
        return perf_counter_ns() * WATTS // 1000 if self._counts else None

    def synchronise(self) -> None:
        """Wait for every stream."""
        for stream in self._streams:
            stream.idle()

    def close(self) -> None:
        """End all threads and take all memory back."""
        for stream in self._streams:
            stream.close()
        with self._lock:
            for place, memory in self._lent.values():
                self._room[place] += memory.numel()
            self._lent.clear()

    def _lend(self, place: str, nbytes: int) -> Tensor:
        with self._lock:
            where = "the device" if place == "device" else "the host"
            require(nbytes, self._room[place], self.name, where)
            memory = torch.zeros(nbytes, dtype=torch.uint8)
            self._room[place] -= memory.numel()
            self._lent[memory.data_ptr()] = place, memory
        return memory

    def _begin(self) -> None:
        """Count a copy; raise what it shall fail with."""
        with self._lock:
            at, self.copies = self.copies, self.copies + 1
        error = self._fails(at)
        if error is not None:
            raise error


class FakeEvent:
    """A place in a stream's work, and the time at which it was reached."""

    def __init__(self, stream: FakeStream) -> None:
        """Wait to be reached."""
        self.at: int | None = None
        self._stream = stream

    def done(self) -> bool:
        """Return whether it was reached."""
        return self.at is not None

    def wait(self) -> None:
        """Wait until it is reached."""
        self._stream.until(self.done)

    def since(self, earlier: Event) -> int:
        """Return the ns since *earlier*."""
        assert isinstance(earlier, FakeEvent)
        assert self.at is not None
        assert earlier.at is not None
        return self.at - earlier.at


class FakeStream:
    """A thread that copies; an error ends all it does, as on a device."""

    def __init__(self, begin: Callable[[], None], pace: Pace | None, number: int) -> None:
        """Start the thread; *begin* is called before each copy."""
        self._begin, self._pace = begin, pace
        self._queue: deque[tuple[Tensor, Tensor] | FakeEvent] = deque()
        self._change = Condition()
        self._busy = self._ends = False
        self._error: BaseException | None = None
        self._thread = Thread(target=self._work, name=f"moetier fake stream {number}", daemon=True)
        self._thread.start()

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Queue a copy."""
        assert to.shape == source.shape
        self._add((to, source))

    copy_back = copy

    def record(self) -> Event:
        """Return an event; at once reached where nothing is under way."""
        event = FakeEvent(self)
        with self._change:
            if self._queue or self._busy:
                self._queue.append(event)
            else:
                event.at = perf_counter_ns()
        return event

    @contextmanager
    def running(self) -> Iterator[None]:
        """Compute in the calling thread."""
        yield

    def synchronise(self) -> None:
        """Wait until nothing is queued or under way."""
        self.until(lambda: not (self._queue or self._busy))

    def idle(self) -> None:
        """Wait until nothing is under way, whatever went wrong."""
        with self._change:
            self._change.wait_for(
                lambda: self._error is not None or self._ends or not (self._queue or self._busy)
            )

    def until(self, true: Callable[[], bool]) -> None:
        """Wait until *true* says so, or something went wrong."""
        with self._change:
            self._change.wait_for(lambda: self._error is not None or self._ends or true())
            if self._error is not None:
                raise self._error
            if not true():
                raise RuntimeError("the stream was closed while somebody waited for it")

    def close(self) -> None:
        """End the thread; what is queued stays undone."""
        with self._change:
            self._ends = True
            self._change.notify_all()
        self._thread.join()

    def _add(self, item: tuple[Tensor, Tensor] | FakeEvent) -> None:
        with self._change:
            self._queue.append(item)
            self._change.notify_all()

    def _work(self) -> None:
        free = 0
        while (item := self._next()) is not None:
            if isinstance(item, FakeEvent):
                item.at = perf_counter_ns()
                continue
            began = perf_counter_ns()
            try:
                self._begin()
                to, source = item
                to.copy_(source)
            except BaseException as error:  # whatever it is, who waits must hear of it
                with self._change:
                    self._error = error
                    self._change.notify_all()
                return
            if self._pace is not None:
                free = max(began, free) + self._pace.ns(len(to))
                wait_until(free, perf_counter_ns, lambda: self._ends)

    def _next(self) -> tuple[Tensor, Tensor] | FakeEvent | None:
        with self._change:
            self._busy = False
            self._change.notify_all()
            while not self._queue and not self._ends:
                self._change.wait()
            if self._ends:
                return None
            self._busy = True
            return self._queue.popleft()
