"""This module says what the columns of a report mean, and which two to begin with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moetier.experiments.bars import NAMES
from moetier.experiments.quantities import QUANTITIES, Quantity, quantity
from moetier.experiments.report.folder import Folder
from moetier.experiments.search_config import column

MAX_FULL = 5_000
"""With more points than these, only the columns of `QUANTITIES`, parts and capacities are kept."""

PREFERRED = (
    ("byte_miss_rate", "accuracy"),
    ("tpot_ms", "energy_mj_per_token"),
    ("tpot_ms", "byte_miss_rate"),
    ("tpot_ms", "miss_rate"),
)
_PARTED = (
    ("time_breakdown_ms.", "time", "ms"),
    ("energy_breakdown.", "energy", "mJ"),
    ("accuracy_by_task.", "accuracy", "share"),
    ("nll_by_task.", "negative log-likelihood", "nats"),
)
_KEPT = ("time_breakdown_ms.", "energy_breakdown.", "capacity_bytes.")


def about(name: str) -> Quantity:
    """Return what is known of the column *name*; a cache costs memory, so less is better."""
    if name.startswith("capacity_bytes."):
        tier = name.partition(".")[2]
        return Quantity(f"expert cache in {tier}", "GiB", scale=float(1 << 30))
    for prefix, title, unit in _PARTED:
        if name.startswith(prefix):
            part = name.removeprefix(prefix)
            return Quantity(f"{title}, {NAMES.get(part, part)}", unit, None)
    return quantity(name)


def metric_names(folder: Folder) -> tuple[list[str], list[str]]:
    """Return the columns to show, the well known first, and those that are left out for size."""
    found = dict.fromkeys(name for entry in folder.entries for name in entry.metrics)
    order = {name: at for at, name in enumerate(QUANTITIES)}
    known = [
        name
        for name in found
        if any(entry.metrics.get(name) is not None for entry in folder.entries)
    ]
    ordered = sorted(known, key=lambda name: order.get(name, len(order)))
    if len(folder.entries) <= MAX_FULL:
        return ordered, []
    kept = [name for name in ordered if name in QUANTITIES or name.startswith(_KEPT)]
    return kept, [name for name in ordered if name not in kept]


def numeric(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return which of *names* can be an axis: a number in at least one of *rows*, text in none."""
    kinds = {name: {type(row.get(name)) for row in rows} - {type(None)} for name in names}
    return [name for name in names if kinds[name] and kinds[name] <= {int, float}]


def default_axes(folder: Folder, axes: Sequence[str]) -> tuple[str, str]:
    """Return the two columns to begin with: a search's objectives, else accuracy where it exists.

    *axes* are the columns to choose from, at least one.
    """
    objectives = [column(name) for name in folder.config.get("objectives") or []]
    plots = [
        (str(plot.get("x")), str(plot.get("y")))
        for plot in folder.config.get("plots") or []
        if plot.get("kind") == "pareto"
    ]
    wanted = [tuple(objectives[:2])] if len(objectives) > 1 else []
    for pair in (*wanted, *PREFERRED[:1], *plots, *PREFERRED[1:]):
        if set(pair) <= set(axes):
            return pair[0], pair[1]
    return axes[0], axes[-1]
