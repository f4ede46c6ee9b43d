"""This module chooses the points of a report that get a bar, a timeline or a line in a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moetier.experiments.report.columns import about
from moetier.experiments.report.folder import Entry
from moetier.sim.policy.seams import SEAMS


def contends(entry: Entry) -> bool:
    """Return whether *entry* may be on a front: it keeps a search's limits, and is no oracle.

    What knows the future is a bound to look at, and nothing to choose.
    """
    config = entry.outcome.get("config")
    policy = config.get("policy") if isinstance(config, dict) else None
    return entry.metrics.get("feasible") is not False and not _knows_the_future(policy)


def _knows_the_future(policy: Any) -> bool:
    if not isinstance(policy, dict):
        return False
    return any(
        getattr(SEAMS[seam].get(kind), "needs_future", False)
        for seam, value in policy.items()
        if seam in SEAMS
        for kind in _kinds(value)
        if kind in SEAMS[seam].names()
    )


def _kinds(value: Any) -> list[str]:
    """Return the names of the parts in *value*, which may be one for each tier."""
    if isinstance(value, dict):
        inner = [value["kind"]] if "kind" in value else list(value.values())
        return [kind for item in inner for kind in _kinds(item)]
    return [value] if isinstance(value, str) else []


def on_front(entries: Sequence[Entry], x: str, y: str) -> list[int]:
    """Return the numbers of *entries* on the front of two columns, the best in *x* first.

    As `pareto.front` for two columns, by sorting, so that ten thousand points take no time. There
    is none where a column has no better direction.
    """
    ways = (about(x).better, about(y).better)
    if None in ways:
        return []
    signs = [1 if way == "lower" else -1 for way in ways]
    points = {
        at: (signs[0] * entry.metrics[x], signs[1] * entry.metrics[y])
        for at, entry in enumerate(entries)
        if entry.metrics.get(x) is not None and entry.metrics.get(y) is not None and contends(entry)
    }
    found: list[int] = []
    for at in sorted(points, key=lambda at: (points[at], at)):
        if not found or points[at][1] < points[found[-1]][1] or points[at] == points[found[-1]]:
            found.append(at)
    return found


def some(n: int, first: Sequence[int], most: int) -> list[int]:
    """Return at most *most* numbers below *n*, those of *first* before an even draw of others."""
    chosen = _even(list(dict.fromkeys(first)), most)
    rest = [at for at in range(n) if at not in set(chosen)]
    return sorted([*chosen, *_even(rest, most - len(chosen))])


def _even(items: list[int], most: int) -> list[int]:
    if len(items) <= most:
        return items
    return [items[at * len(items) // most] for at in range(most)] if most > 0 else []


def differing(entries: Sequence[Entry]) -> list[str]:
    """Return the columns of the config that differ between *entries*, those of parts left out.

    A search has a column per seam (`policy.miss`), which the policy's name says already.
    """
    names = list(dict.fromkeys(name for entry in entries for name in entry.axes))
    return [
        name
        for name in names
        if not name.startswith("policy.")
        and len({str(entry.axes.get(name)) for entry in entries}) > 1
    ]


def title_of(entry: Entry, names: Sequence[str]) -> str:
    """Return *entry* as text: its policy, and what of *names* it has."""
    return ", ".join([entry.policy, *rest_of(entry, [n for n in names if n != "policy"])])


def rest_of(entry: Entry, names: Sequence[str]) -> list[str]:
    """Return what of *names* describes *entry*, names alone and others with their key."""
    return [_spell(name, entry.axes[name]) for name in names if entry.axes.get(name) is not None]


def _spell(name: str, value: Any) -> str:
    if name in ("policy", "hardware", "source"):
        return str(value)
    return f"{name.rpartition('.')[2]} {value}"
