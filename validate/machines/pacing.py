"""This module holds a lane to a stated rate, so that a fast disk behaves like a slow, steady one.

A paced transfer of n bytes really reads them, and then waits until `start + latency + n / rate`.
Choose a rate below what the disk gives at its worst; transfers that the disk itself made late are
counted, for then the pace was not kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from moetier.sim.units import ceil_div
from moetier.traces.errors import InputError

SPIN_NS = 150_000
"""How long before a deadline to stop sleeping: Linux wakes a sleeper some 60 us late."""

NAP_NS = 20_000_000
"""The longest sleep in one piece, so that a lane hears soon that it shall end."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What each lane is capped at: *rate* in bytes/s, and *latency* in ns once per transfer."""

    rate: int
    latency: int = 0

    def __post_init__(self) -> None:
        """Refuse what no transfer could keep."""
        if self.rate <= 0 or self.latency < 0:
            raise InputError(
                f"{self.rate} bytes/s after {self.latency} ns",
                where="pace",
                way_out="give a rate above zero, and a latency of zero or more",
            )

    def ns(self, nbytes: int) -> int:
        """Return how long a transfer of *nbytes* takes, rounded up as `Link.copy_ns` does."""
        return self.latency + ceil_div(nbytes * 1_000_000_000, self.rate)


def wait_until(
    deadline: int, now: Callable[[], int], stop: Callable[[], bool] = lambda: False
) -> int:
    """Return the time, in ns of *now*, once it is *deadline* or later, or *stop* says so.

    It sleeps, and for the last stretch only yields: without load it returns within some
    microseconds of the deadline, never before it.
    """
    while (left := deadline - (at := now())) > 0 and not stop():
        time.sleep(min(left - SPIN_NS, NAP_NS) / 1e9 if left > SPIN_NS else 0)
    return at
