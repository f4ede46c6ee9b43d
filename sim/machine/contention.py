"""This module slows compute down while a copy into the fastest tier is in flight.

Copies and compute share what is not modelled apart: the bandwidth of the memory both use, the cores
that issue reads. With a slowdown of s, compute progresses at 1 / (1 + s) of its speed during every
nanosecond in which a lane of the link into the fastest tier is busy. With s = p / q, progress is
counted in units of which a nanosecond alone gives p + q and one beside a copy gives q, so it is
exact; a piece of compute (the dense part, the experts of a batch, or with overlap one expert) ends
with the nanosecond in which it is done.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from moetier.sim.units import ceil_div

# From a time, in ns: is the link busy there, and until when is that sure? The question may be asked
# of a time only when nothing else can happen up to the end of that nanosecond.
Occupied = Callable[[int], tuple[bool, int]]


class Contention:
    """How long compute takes beside a link."""

    def __init__(self, slowdown: Fraction, occupied: Occupied) -> None:
        """Take *slowdown*, above zero: 1/5 means that compute takes a fifth longer."""
        self._shared = slowdown.denominator
        self._alone = slowdown.numerator + slowdown.denominator
        self._occupied = occupied

    def end_of(self, begin: int, work: int) -> int:
        """Return when *work*, in ns of undisturbed compute, is done if it begins at *begin*."""
        at, left = begin, work * self._alone
        while left:
            busy, until = self._occupied(at)
            rate = self._shared if busy else self._alone
            if left <= rate * (until - at):
                return at + ceil_div(left, rate)
            left -= rate * (until - at)
            at = until
        return at
