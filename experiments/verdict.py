"""This module says whether simulations were close enough to real runs, and what came of each."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from moetier.sim.hardware import Profile
    from moetier.validate.compare.grid import Point, Summary
    from moetier.validate.compare.load import Load

Wrong = Literal["bandwidth doubled", "contention off"]  # the keys of validate.compare.wrong.WRONG


class Tolerances(BaseModel):
    """What is wrong by more fails. With *beyond_spread* what repeats differ by is no error.

    A *kendall_tau* of null asks for no ranking. What *must_notice* names are simulations of wrong
    machines: were these to pass, the comparison would say nothing, and so it fails.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    median_error: float = Field(default=0.1, ge=0)  # of the time per output token, over all points
    p90_error: float = Field(default=0.2, ge=0)  # likewise, the 90th percentile
    kendall_tau: float | None = Field(default=0.9, ge=-1, le=1)
    equal: bool = True  # must decisions and bytes be the same?
    beyond_spread: bool = False
    must_notice: list[Wrong] = []

    def missed(self, summary: Summary) -> list[str]:
        """Return what *summary* misses, in words."""
        found = []
        beyond = "_beyond_spread" if self.beyond_spread else ""
        for name, most in (("median_error", self.median_error), ("p90_error", self.p90_error)):
            error = getattr(summary, name + beyond)
            if error > most:
                found.append(f"{name}{beyond} is {error:.1%}, above {most:.1%}")
        if self.kendall_tau is not None:
            found += _ranking(summary, self.kendall_tau)
        if self.equal and not summary.equal:
            found.append("decisions or bytes differ though the policy asks no lateness")
        return found


def _ranking(summary: Summary, least: float) -> list[str]:
    tau = summary.kendall_tau
    if tau is None:
        ties = summary.ranking.ties
        why = f"repeats tell none of {ties} pairs apart" if ties else "no capacity has two policies"
        return [
            f"kendall_tau cannot be tested against {least}: {why}; state `kendall_tau: null` where "
            "no ranking is asked for"
        ]
    return [f"kendall_tau is {tau:.3f}, below {least}"] if tau < least else []


def unnoticed(wanted: Sequence[str], would_notice: Mapping[str, bool]) -> list[str]:
    """Return which of the wrong machines *wanted* were not noticed, in words."""
    return [
        f"'{name}' would not be noticed: "
        + ("a wrong simulation passes too" if name in would_notice else "it changes nothing here")
        for name in wanted
        if not would_notice.get(name, False)
    ]


@dataclass(frozen=True)
class Validation:
    """What came of a comparison; *missed* says which tolerances were.

    *would_notice* says of each wrong machine whether a simulation of it misses a tolerance; one
    that is not there is like the right one.
    """

    name: str
    tolerances: Tolerances
    profile: Profile
    points: list[Point]
    summary: Summary
    would_notice: dict[str, bool]
    load: Load
    missed: list[str]
    known_limitations: list[str]

    @property
    def passed(self) -> bool:
        """Return whether no tolerance was missed."""
        return not self.missed

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        summary = self.summary
        return {
            "name": self.name,
            "passed": self.passed,
            "missed": self.missed,
            "points": [point.as_dict() for point in self.points],
            "median_error": summary.median_error,
            "p90_error": summary.p90_error,
            "median_error_beyond_spread": summary.median_error_beyond_spread,
            "p90_error_beyond_spread": summary.p90_error_beyond_spread,
            "kendall_tau": summary.kendall_tau,
            "pairs": asdict(summary.ranking),
            "equal": summary.equal,
            "stalled_points": summary.stalled,
            "tolerances": self.tolerances.model_dump(),
            "would_notice": self.would_notice,
            "load": self.load.as_dict(),
            "hardware": self.profile.name,
            "identity": self.profile.identity,
            "known_limitations": self.known_limitations,
        }

    def as_csv(self) -> str:
        """Return a table with a row per point; where there are repeats, their median."""
        rows = [_row(point) for point in self.points]
        text = io.StringIO()
        columns = dict.fromkeys(name for row in rows for name in row)
        writer = csv.DictWriter(text, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()


def _row(point: Point) -> dict[str, Any]:
    stalls = [ms for ms in point.stall_measured_ms if ms is not None]
    parts = point.attribution_ms or {}
    return {
        "policy": point.policy,
        **{f"capacity.{tier}": size for tier, size in point.capacity.items()},
        "decision_log_equal": point.decision_log_equal,
        "bytes_equal": point.bytes_equal,
        "asks_lateness": point.asks_lateness,
        "miss_rate": point.miss_rate,
        "bytes_read_total": point.bytes_read_total,
        "tpot_sim_ms": point.tpot_sim_ms,
        "tpot_measured_ms": point.timed.median,
        "tpot_measured_min_ms": min(point.tpot_measured_ms),
        "tpot_measured_max_ms": max(point.tpot_measured_ms),
        "repeats": len(point.tpot_measured_ms),
        "error": point.error,
        "spread": point.spread,
        "stall_sim_ms": point.stall_sim_ms,
        "stall_measured_ms": median(stalls) if stalls else None,
        **{f"attribution_{name}_ms": value for name, value in parts.items()},
    }
