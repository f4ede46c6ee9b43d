"""This module draws where time and energy go: one stacked bar per point."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetier.experiments.canvas import COLORS, new_figure, save
from moetier.experiments.figure_data import check_column, differing, entry
from moetier.traces.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from moetier.experiments.sweep import PlotConfig

PARTS = {
    "time": ("time_breakdown_ms.", "time per output token (ms)"),
    "energy": ("energy_breakdown.", "energy per token (mJ)"),
}
NAMES = {
    "dense": "dense part", "wait": "waiting for copies", "expert": "experts", "compute": "compute",
    "fast_tier": "fastest tier", "lower_tiers": "lower tiers", "links": "links",
    "static": "static power",
}  # fmt: skip


def breakdown(rows: pd.DataFrame, plot: PlotConfig, path: Path, title: str) -> pd.DataFrame:
    """Draw the breakdown of *rows* to *path* and return the table drawn.

    `y` may be `time` or `energy` (default: both, side by side); `x` names the column that labels
    the bars (default: every column that differs).
    """
    if plot.y is not None and plot.y not in PARTS:
        raise InputError(f"y: '{plot.y}' has no breakdown", way_out=f"use {' or '.join(PARTS)}")
    shown = [plot.y] if plot.y else list(PARTS)
    labels = _labels(rows, plot)
    lines = max(text.count("\n") + 1 for text in labels)
    height = 1.6 + 0.26 * len(rows) * lines
    longest = max(len(line) for text in labels for line in text.split("\n"))
    width = 5.4 * len(shown) + 1.2 + 0.07 * max(0, longest - 24)
    figure, axes = new_figure(width, max(height, 2.6), len(shown))
    drawn: dict[str, Any] = {"label": labels}
    for at, (kind, ax) in enumerate(zip(shown, [axes] if len(shown) == 1 else axes, strict=True)):
        prefix, axis_title = PARTS[kind]
        left = [0.0] * len(rows)
        columns = [str(c) for c in rows.columns if str(c).startswith(prefix)]
        for column, color in zip(columns, COLORS, strict=False):
            values = [float(v) if v == v and v is not None else 0.0 for v in rows[column].tolist()]
            drawn[column] = values
            if any(values):
                name = column.removeprefix(prefix)
                ax.barh(
                    range(len(rows)), values, left=left, color=color, label=NAMES.get(name, name)
                )
            left = [a + b for a, b in zip(left, values, strict=True)]
        ax.set_xlabel(f"{axis_title}\n← lower is better")
        ax.set_yticks(range(len(rows)), labels if at == 0 else [""] * len(rows))
        ax.invert_yaxis()
        ax.grid(False, axis="y")
        ax.legend(
            loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, frameon=False, fontsize="small"
        )
    figure.suptitle(title)
    save(figure, path)
    import pandas as pd

    return pd.DataFrame(drawn).assign(key=rows["key"])


def _labels(rows: pd.DataFrame, plot: PlotConfig) -> list[str]:
    """Return one label per bar: the columns named, or those of the config that differ."""
    names = [
        check_column(rows, name, key) for key, name in (("hue", plot.hue), ("x", plot.x)) if name
    ]
    names = names or differing(rows) or ["policy"]
    return [", ".join(entry(name, row[name]) for name in names) for _, row in rows.iterrows()]
