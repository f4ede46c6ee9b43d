"""This module puts simulated and measured times side by side, where `moetier validate` ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from moetier.experiments.report.figure import UNKNOWN, Figure, Table, number, percent
from moetier.experiments.report.palette import label, look


def measured(found: Mapping[str, Any]) -> Figure | None:
    """Return the points of a validation as a figure; None where none has both times.

    *found* is what validation.json holds: times in ms, shares as fractions.
    """
    points = [
        point
        for point in found["points"]
        if _positive(point.get("tpot_sim_ms")) and _repeats(point)
    ]
    if not points:
        return None
    policies = list(dict.fromkeys(str(point.get("policy")) for point in points))
    ends = [value for point in points for value in (point["tpot_sim_ms"], *_repeats(point))]
    low, high = min(ends) / 1.2, max(ends) * 1.2
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter", "mode": "lines", "name": "equal", "meta": "equal",
            "x": [low, high], "y": [low, high],
            "line": {"color": "#7F7F7F", "width": 1.2, "dash": "dash"}, "hoverinfo": "skip",
        }
    ]  # fmt: skip
    for at, policy in enumerate(policies):
        color, symbol, _ = look(at)
        own = [point for point in points if str(point.get("policy")) == policy]
        middles = [median(_repeats(point)) for point in own]
        traces.append({
            "type": "scatter",
            "mode": "markers",
            "name": label(policy, 44),
            "meta": policy,
            "x": middles,
            "y": [point["tpot_sim_ms"] for point in own],
            "error_x": {
                "type": "data", "symmetric": False, "color": color, "thickness": 1,
                "array": [max(_repeats(p)) - m for p, m in zip(own, middles, strict=True)],
                "arrayminus": [m - min(_repeats(p)) for p, m in zip(own, middles, strict=True)],
            },
            "marker": {"color": color, "symbol": symbol, "size": 9},
            "text": [label(_capacity(point), 40) for point in own],
            "hovertemplate": (
                "%{text}: measured %{x:.4g} ms, simulated %{y:.4g} ms"
                "<extra>%{fullData.name}</extra>"
            ),
        })  # fmt: skip
    hardware = str(found.get("hardware") or "this machine")
    return Figure(
        name="measured",
        title=f"Simulated against measured on {hardware}",
        alt=(
            f"Time per output token, simulated over measured, {len(points)} points of "
            f"{len(policies)} policies beside the diagonal of equality. {summary(found)}"
        ),
        traces=traces,
        layout={
            "height": 460,
            "xaxis": {
                "title": {"text": "time per output token, measured (ms)"},
                "type": "log", "dtick": "D2", "minor": {"showgrid": False},
            },
            "yaxis": {
                "title": {"text": "time per output token, simulated (ms)"},
                "type": "log", "dtick": "D2",
            },
        },
        table=_table(points),
        notes=["Whiskers go from the fastest to the slowest repeat."],
    )  # fmt: skip


def summary(found: Mapping[str, Any]) -> str:
    """Return in a sentence how far the simulation was off."""
    tau = found.get("kendall_tau")
    kept = "none" if tau is None else f"{tau:.3f}"
    decisions = "equal" if found.get("equal") else "not all equal"
    return (
        f"Median error {percent(found.get('median_error'))}, 90th percentile "
        f"{percent(found.get('p90_error'))}, Kendall's tau {kept}; decisions and bytes {decisions}."
    )


def remarks(found: Mapping[str, Any]) -> list[str]:
    """Return what else a validation says of itself: beyond the spread, load, wrong machines."""
    said = []
    beyond = found.get("median_error_beyond_spread"), found.get("p90_error_beyond_spread")
    if None not in beyond:
        said.append(
            f"Beyond what repeats differ by, the median error is {percent(beyond[0])} and the 90th "
            f"percentile {percent(beyond[1])}."
        )
    others = (found.get("load") or {}).get("others_share")
    if others is not None:
        said.append(f"While it ran, other processes used {percent(others, 0)} of the cores.")
    for name, noticed in (found.get("would_notice") or {}).items():
        verdict = "misses a tolerance, as it should" if noticed else "would pass too"
        said.append(f"A simulation with {name} {verdict}.")
    return said


def _table(points: Sequence[Mapping[str, Any]]) -> Table:
    head = [
        "policy", "cache", "decisions", "bytes", "simulated ms", "measured ms", "repeats ms",
        "error", "spread", "stall, measured",
    ]  # fmt: skip
    rows = [
        [
            str(point.get("policy")),
            _capacity(point),
            "equal" if point.get("decision_log_equal") else str(point.get("first_difference")),
            "equal" if point.get("bytes_equal") else "differ",
            number(point["tpot_sim_ms"]),
            number(median(_repeats(point))),
            ", ".join(number(value) for value in _repeats(point)),
            UNKNOWN if point.get("error") is None else f"{point['error']:+.1%}",
            percent(point.get("spread")),
            percent(_middle(point.get("stall_share_measured"))),
        ]
        for point in points
    ]
    return Table("Every point with its repeats", head, rows)


def _capacity(point: Mapping[str, Any]) -> str:
    return ", ".join(f"{tier} {size}" for tier, size in (point.get("capacity") or {}).items())


def _repeats(point: Mapping[str, Any]) -> list[float]:
    return [value for value in point.get("tpot_measured_ms") or [] if _positive(value)]


def _middle(values: Sequence[float | None] | None) -> float | None:
    known = [value for value in values or [] if value is not None]
    return median(known) if known else None


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0
