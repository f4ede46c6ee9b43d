"""This module runs a grid on two machines, in turn, and puts what they did side by side."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from moetier.validate.compare.attribution import attribute, stall_ms
from moetier.validate.compare.observe import Case, Observed, Run, observe
from moetier.validate.compare.ranking import Ranking, Timed, rank

BYTES = (
    "lookups", "misses", "lookup_bytes", "miss_bytes", "fetch_bytes", "skipped_bytes",
    "degraded_bytes", "spared_bytes", "prefetch_bytes", "prefetch_issued", "prefetch_used",
    "prefetch_wasted_bytes", "warmup_bytes", "resident_bytes", "peak_bytes",
)  # fmt: skip
"""Columns that do not depend on time where the policy does not."""


@dataclass(frozen=True)
class Point:
    """One policy at one capacity on both machines; times in ms, shares as fractions."""

    policy: str
    capacity: Mapping[str, str]
    asks_lateness: bool  # then the decisions may differ
    decision_log_equal: bool
    bytes_equal: bool
    first_difference: str | None
    miss_rate: float | None
    bytes_read_total: int
    tpot_sim_ms: float
    tpot_measured_ms: list[float]
    stall_share_sim: float
    stall_share_measured: list[float]
    stall_sim_ms: float | None  # per token, as TPOT counts
    stall_measured_ms: list[float | None]
    attribution_ms: dict[str, float] | None  # of the middle repeat

    @property
    def timed(self) -> Timed:
        """Return the times alone."""
        return Timed(self.tpot_sim_ms, self.tpot_measured_ms)

    @property
    def error(self) -> float:
        """Return how far the simulation is above the median measurement, as a share of it."""
        return self.tpot_sim_ms / self.timed.median - 1

    @property
    def spread(self) -> float:
        """Return the largest less the smallest repeat, as a share of the median."""
        return self.timed.spread / self.timed.median

    @property
    def error_beyond_spread(self) -> float:
        """Return by how much the error is larger than the spread, 0 where it is not."""
        return max(abs(self.error) - self.spread, 0.0)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return vars(self) | {"error": self.error, "spread": self.spread}


def run_grid(
    cases: Sequence[Case],
    simulated: Run,
    measured: Run,
    *,
    repeats: int,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Point]:
    """Simulate every case once and measure it *repeats* times, in an order drawn anew each time."""
    rng, total, done = random.Random(seed), len(cases) * (1 + repeats), 0

    def seen(run: Run, case: Case) -> Observed:
        nonlocal done
        found = observe(run, case)
        done += 1
        if on_progress is not None:
            on_progress(done, total)
        return found

    virtual = [seen(simulated, case) for case in cases]
    real: list[list[Observed]] = [[] for _ in cases]
    for _ in range(repeats):
        for at in rng.sample(range(len(cases)), len(cases)):
            real[at].append(seen(measured, cases[at]))
    return [_point(*found) for found in zip(cases, virtual, real, strict=True)]


def _point(case: Case, virtual: Observed, real: Sequence[Observed]) -> Point:
    sim, warmup = virtual.result.metrics, case.setting.warmup_steps
    times = [float(one.result.metrics["tpot_ms"]) for one in real]
    middle = min(range(len(times)), key=lambda at: abs(times[at] - median(times)))
    differences = [virtual.decisions.first_difference(one.decisions) for one in real]
    return Point(
        policy=case.policy,
        capacity=dict(case.capacity),
        asks_lateness=virtual.result.stage.policy.asks_lateness,
        decision_log_equal=not any(differences),
        bytes_equal=all(_same_bytes(virtual, one) for one in real),
        first_difference=next(filter(None, differences), None),
        miss_rate=sim["miss_rate"],
        bytes_read_total=sim["bytes_read_total"],
        tpot_sim_ms=sim["tpot_ms"],
        tpot_measured_ms=times,
        stall_share_sim=sim["stall_share"],
        stall_share_measured=[one.result.metrics["stall_share"] for one in real],
        stall_sim_ms=stall_ms(virtual.rows, warmup),
        stall_measured_ms=[stall_ms(one.rows, warmup) for one in real],
        attribution_ms=None if differences[middle] else attribute(virtual, real[middle], warmup),
    )


def _same_bytes(one: Observed, other: Observed) -> bool:
    return all(np.array_equal(one.rows[name], other.rows[name]) for name in BYTES)


@dataclass(frozen=True)
class Summary:
    """The error over a grid, as shares, and how policies are ranked.

    Those *beyond_spread* are what errors exceed the spread of the repeats by.
    """

    median_error: float
    p90_error: float
    median_error_beyond_spread: float
    p90_error_beyond_spread: float
    ranking: Ranking
    stalled: int  # points with a stall of 30 % or more of TPOT
    equal: bool  # decisions and bytes, wherever the policy asks no lateness

    @property
    def kendall_tau(self) -> float | None:
        """Return Kendall's tau over pairs of policies at equal capacity."""
        return self.ranking.tau


STALLED = 0.3


def summarise(points: Sequence[Point]) -> Summary:
    """Return the errors of *points*.

    Policies are compared with one another at the same capacity, not across capacities.
    """
    errors = [abs(point.error) for point in points]
    beyond = [point.error_beyond_spread for point in points]
    by_capacity: dict[str, list[Timed]] = {}
    for point in points:
        by_capacity.setdefault(str(point.capacity), []).append(point.timed)
    return Summary(
        median_error=float(np.quantile(errors, 0.5)),
        p90_error=float(np.quantile(errors, 0.9)),
        median_error_beyond_spread=float(np.quantile(beyond, 0.5)),
        p90_error_beyond_spread=float(np.quantile(beyond, 0.9)),
        ranking=sum((rank(times) for times in by_capacity.values()), Ranking()),
        stalled=sum(median(point.stall_share_measured) >= STALLED for point in points),
        equal=all(
            point.asks_lateness or (point.decision_log_equal and point.bytes_equal)
            for point in points
        ),
    )
