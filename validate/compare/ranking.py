"""This module says whether a simulation ranks policies as measurements do: Kendall's tau.

Repeats of a measurement differ, so a pair of policies counts only where the measurement can tell
them apart: where their medians differ by more than the mean of the two spreads, a spread being the
largest less the smallest repeat. Over those pairs

    tau = (concordant - discordant) / pairs

A pair that the simulation gives equal times is neither, and so lowers tau.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median


@dataclass(frozen=True)
class Timed:
    """A time that was simulated, and the repeats in which it was measured, in any one unit."""

    simulated: float
    measured: Sequence[float]

    @property
    def median(self) -> float:
        """Return the middle of the repeats."""
        return float(median(self.measured))

    @property
    def spread(self) -> float:
        """Return the largest less the smallest repeat."""
        return max(self.measured) - min(self.measured)


@dataclass(frozen=True)
class Ranking:
    """How pairs compare; `ties` are those that the measurement does not tell apart."""

    concordant: int = 0
    discordant: int = 0
    undecided: int = 0  # equal in the simulation, and not as measured
    ties: int = 0

    @property
    def tau(self) -> float | None:
        """Return Kendall's tau, from -1 to 1; None where no pair counts."""
        pairs = self.concordant + self.discordant + self.undecided
        return (self.concordant - self.discordant) / pairs if pairs else None

    def __add__(self, other: Ranking) -> Ranking:
        """Return the pairs of both together."""
        return Ranking(
            self.concordant + other.concordant,
            self.discordant + other.discordant,
            self.undecided + other.undecided,
            self.ties + other.ties,
        )


def rank(times: Iterable[Timed]) -> Ranking:
    """Compare all pairs of *times*."""
    return sum((_pair(a, b) for a, b in combinations(times, 2)), Ranking())


def _pair(a: Timed, b: Timed) -> Ranking:
    measured, simulated = a.median - b.median, a.simulated - b.simulated
    if abs(measured) <= (a.spread + b.spread) / 2:
        return Ranking(ties=1)
    if simulated == 0:
        return Ranking(undecided=1)
    return Ranking(concordant=1) if measured * simulated > 0 else Ranking(discordant=1)
