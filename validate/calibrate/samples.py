"""This module repeats a measurement: its median, and how far the repeats vary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from statistics import median, quantiles
from time import perf_counter_ns

LEAST, MOST = 3, 60
"""Repeats of one measurement, whatever its share of the time."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The repeats of one measurement, in ns."""

    values: tuple[int, ...]

    @property
    def ns(self) -> int:
        """Return the median, and at least 1."""
        return max(round(median(self.values)), 1)

    @property
    def spread(self) -> Fraction:
        """Return the interquartile range over the median, to a tenth of a per cent."""
        if len(self.values) < 2:
            return Fraction(0)
        low, _, high = quantiles(self.values, n=4, method="inclusive")
        return Fraction(round(1000 * (high - low) / self.ns), 1000)


def repeat(
    once: Callable[[], int], seconds: float, now: Callable[[], int] = perf_counter_ns
) -> Sample:
    """Return the repeats of *once*, which returns ns, that fit in *seconds*; the first is not kept.

    The first run of a shape is slower than all others: memory is touched and kernels are chosen.
    """
    end = now() + round(seconds * 1e9)
    once()
    values: list[int] = []
    while len(values) < LEAST or (now() < end and len(values) < MOST):
        values.append(once())
    return Sample(tuple(values))


def alternate(
    first: Callable[[], int],
    second: Callable[[], int],
    seconds: float,
    now: Callable[[], int] = perf_counter_ns,
) -> tuple[Sample, Sample]:
    """Return the repeats of both, in turn, so that what drifts meanwhile does so for both."""
    others: list[int] = []

    def both() -> int:
        took = first()
        others.append(second())
        return took

    found = repeat(both, seconds, now)
    return found, Sample(tuple(others[1:]))
