"""This module keeps the time of a real machine: the wall clock, less what is not charged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter_ns


class Clock:
    """Nanoseconds since it was made, less the time during which it was stopped.

    Threads may read it at any time; one thread stops it. While it is stopped it stands still, so a
    deadline in its time moves back by as much.
    """

    def __init__(self) -> None:
        """Begin at 0."""
        self._state: tuple[int | None, int] = None, perf_counter_ns()  # stopped at, zero point

    def restart(self) -> None:
        """Begin at 0 again; nobody may be waiting for a time."""
        self._state = None, perf_counter_ns()

    def now(self) -> int:
        """Return the time in ns."""
        stopped_at, zero = self._state  # one read, so that both belong together
        return (perf_counter_ns() if stopped_at is None else stopped_at) - zero

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stand still until the block ends; blocks do not nest."""
        at, zero = perf_counter_ns(), self._state[1]
        self._state = at, zero
        try:
            yield
        finally:
            self._state = None, zero + perf_counter_ns() - at
