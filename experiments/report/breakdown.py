"""This module shows where time and energy go: a stacked bar per point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moetier.experiments.bars import NAMES, PARTS
from moetier.experiments.report.choice import differing, title_of
from moetier.experiments.report.figure import Figure, Table, number
from moetier.experiments.report.folder import Entry
from moetier.experiments.report.palette import COLORS, label

PATTERNS = ("", "/", ".", "x", "\\", "-", "+")
"""One per part, so that the bars can be read without colours."""


def breakdowns(entries: Sequence[Entry], n_all: int) -> list[Figure]:
    """Return the figures of time and energy of *entries*, chosen out of *n_all* points."""
    names = differing(entries)
    labels = [title_of(entry, names) for entry in entries]
    notes = []
    if len(entries) < n_all:
        notes.append(
            f"{len(entries)} of {n_all} points: those of the front, then the others evenly."
        )
    found = []
    for kind, (prefix, axis_title) in PARTS.items():
        parts = list(
            dict.fromkeys(
                name
                for entry in entries
                for name, value in entry.metrics.items()
                if name.startswith(prefix) and value
            )
        )
        if parts:
            found.append(_figure(kind, prefix, axis_title, parts, entries, labels, notes))
    return found


def _figure(
    kind: str,
    prefix: str,
    axis_title: str,
    parts: Sequence[str],
    entries: Sequence[Entry],
    labels: Sequence[str],
    notes: list[str],
) -> Figure:
    spoken = {
        part: NAMES.get(part.removeprefix(prefix), part.removeprefix(prefix)) for part in parts
    }
    places = list(range(len(entries)))
    values = {part: [entry.metrics.get(part) for entry in entries] for part in parts}
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": spoken[part],
            "meta": spoken[part],
            "y": places,
            "x": values[part],
            "marker": {
                "color": COLORS[at % len(COLORS)],
                "pattern": {
                    "shape": PATTERNS[at % len(PATTERNS)],
                    "fillmode": "overlay",
                    "fgcolor": "rgba(255,255,255,0.6)",
                    "size": 6,
                    "solidity": 0.2,
                },
            },
            "hovertemplate": f"{spoken[part]}: %{{x:.4g}}<extra></extra>",
        }
        for at, part in enumerate(parts)
    ]
    sums = [sum(values[part][at] or 0 for part in parts) for at in places]
    rows = [
        [labels[at], *(number(values[part][at]) for part in parts), number(sums[at])]
        for at in places
    ]
    ticks = [label(text, 26) for text in labels]
    low, high = min(places, key=sums.__getitem__), max(places, key=sums.__getitem__)
    return Figure(
        name=f"breakdown-{kind}",
        title=axis_title[0].upper() + axis_title[1:],
        alt=(
            f"Stacked bars of the {axis_title} of {len(entries)} points by part "
            f"({', '.join(spoken.values())}); least {number(sums[low])} for {labels[low]}, "
            f"most {number(sums[high])} for {labels[high]}."
        ),
        traces=traces,
        layout={
            "barmode": "stack",
            "height": 130
            + (12 + 14 * max(text.count("<br>") + 1 for text in ticks)) * len(entries),
            "xaxis": {
                "title": {"text": f"{axis_title}<br>← lower is better"},
                "rangemode": "tozero",
            },
            "yaxis": {
                "tickvals": places,
                "ticktext": ticks,
                "autorange": "reversed",
                "showgrid": False,
            },
        },
        table=Table(f"{axis_title}, by part", ["point", *spoken.values(), "sum"], rows),
        notes=notes,
    )
