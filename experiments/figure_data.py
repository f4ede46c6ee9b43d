"""This module prepares columns of results for figures: numbers, labels, groups."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from moetier.experiments.config import parse_capacity
from moetier.experiments.quantities import QUANTITIES, Quantity, quantity
from moetier.traces.errors import InputError, nearest

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Axis:
    """One axis: values to plot (None where unknown), its title, and which way is better."""

    values: list[float | None]
    title: str
    better: str | None
    ticks: list[tuple[float, str]] | None = None  # of an axis of names, and of one of capacities
    errors: list[tuple[float, float]] | None = None  # below and above each value


def done_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of points that are done; raise `InputError` when there are none."""
    rows: pd.DataFrame = table.loc[table["status"] == "done"].reset_index(drop=True)
    if rows.empty:
        raise InputError("no point is done, so there is nothing to draw")
    return rows


def check_column(table: pd.DataFrame, name: str | None, key: str) -> str:
    """Return *name* if it is a column of *table*; otherwise say which are."""
    if name is None:
        raise InputError(f"{key}: this key is missing", way_out="name a metric or a config key")
    if name not in table.columns:
        known = [str(column) for column in table.columns if column not in ("error", "warnings")]
        hint = nearest(name, known)
        names = ", ".join(n for n in known if n in QUANTITIES or "." in n)
        raise InputError(f"{key}: no column '{name}'", way_out=f"{hint}known: {names}")
    return name


def axis(table: pd.DataFrame, name: str) -> Axis:
    """Return the column *name* as an axis: numbers scaled to their unit, names as 0, 1, 2, ..."""
    column = table[name].tolist()
    about = quantity(name)
    if name.startswith("capacity.") and all(isinstance(value, str) for value in column):
        return _capacity_axis([str(value) for value in column], about.label)
    try:
        values = [_number(value) for value in column]
    except (TypeError, ValueError):
        names = list(dict.fromkeys(str(value) for value in column))
        at = [float(names.index(str(value))) for value in column]
        return Axis(list(at), about.label, None, [(float(i), n) for i, n in enumerate(names)])
    scaled = [None if value is None else value / about.scale for value in values]
    return Axis(scaled, about.title, about.better, errors=_errors(table, scaled, about))


def _errors(
    table: pd.DataFrame, values: list[float | None], about: Quantity
) -> list[tuple[float, float]] | None:
    """Return how far each value may be off, downwards and upwards; None where nobody says."""
    if about.error in table.columns:
        spread = [_number(value) or 0.0 for value in table[about.error].tolist()]
        return [(error / about.scale, error / about.scale) for error in spread]
    if about.interval is None or not set(about.interval) <= set(table.columns):
        return None
    ends = zip(*(table[name].tolist() for name in about.interval), strict=True)
    found = []
    for value, (low, high) in zip(values, ends, strict=True):
        below, above = _number(low), _number(high)
        if value is None or below is None or above is None:
            found.append((0.0, 0.0))
        else:
            found.append((value - below / about.scale, above / about.scale - value))
    return found


def groups(table: pd.DataFrame, hue: str | None) -> list[tuple[str, list[int]]]:
    """Return the row numbers of each value of the column *hue*, in order of appearance."""
    if hue is None:
        return [("", list(range(len(table))))]
    found: dict[str, list[int]] = {}
    for row, value in enumerate(table[hue]):
        found.setdefault(str(value), []).append(row)
    return list(found.items())


def _capacity_axis(texts: list[str], label: str) -> Axis:
    sizes = [parse_capacity(text) for text in texts]
    if all(isinstance(size, Fraction) for size in sizes):
        return Axis(
            [float(size * 100) for size in sizes], f"{label} (% of all expert bytes)", "lower"
        )
    if any(isinstance(size, Fraction) for size in sizes):
        raise InputError(
            "sizes and shares cannot share an axis", way_out="use one of them, or capacity_bytes"
        )
    return Axis([float(size) / 2**30 for size in sizes], f"{label} (GiB)", "lower")


def _number(value: Any) -> float | None:
    if value is None or value != value:
        return None
    return float(value)


def differing(table: pd.DataFrame) -> list[str]:
    """Return the columns of the config (those before `status`) that differ between rows."""
    names = [str(name) for name in table.columns]
    config = names[: names.index("status")]
    return [name for name in config if len({str(value) for value in table[name].tolist()}) > 1]


def entry(name: str, value: Any) -> str:
    """Return a config value as a label: names alone, others after the last part of their key."""
    if name in ("policy", "hardware", "source"):
        return str(value)
    return f"{name.rpartition('.')[2]} {value}"
