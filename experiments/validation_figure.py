"""This module draws simulated against measured times, with the diagonal where they agree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moetier.experiments.canvas import new_figure, palette, place_legend, save

if TYPE_CHECKING:
    from moetier.validate.compare.grid import Point


def draw(points: Sequence[Point], path: Path, title: str) -> None:
    """Draw the time per output token of *points*: the median repeat, and whiskers to all others."""
    figure, ax = new_figure()
    ends = [point.timed.median for point in points] + [point.tpot_sim_ms for point in points]
    low, high = min(ends) / 1.3, max(ends) * 1.3
    ax.plot([low, high], [low, high], color="0.6", lw=1, label="equal")
    policies = dict.fromkeys(point.policy for point in points)
    for policy, (color, marker) in zip(policies, palette(), strict=False):
        own = [point for point in points if point.policy == policy]
        xs = [point.timed.median for point in own]
        whiskers = (
            [x - min(point.tpot_measured_ms) for x, point in zip(xs, own, strict=True)],
            [max(point.tpot_measured_ms) - x for x, point in zip(xs, own, strict=True)],
        )
        ys = [point.tpot_sim_ms for point in own]
        ax.errorbar(
            xs, ys, xerr=whiskers, color=color, marker=marker, lw=0, elinewidth=0.8, label=policy
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("time per output token, measured (ms)")
    ax.set_ylabel("time per output token, simulated (ms)")
    ax.set_title(title, fontsize="medium")
    place_legend(ax, "policy")
    save(figure, path)
