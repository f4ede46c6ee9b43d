"""This module draws a report's figures for papers: PNG and PDF, with matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetier.experiments.plots import draw_all
from moetier.experiments.report.columns import about
from moetier.experiments.report.curves import RATE, lines_of, share
from moetier.experiments.report.folder import Entry, Folder
from moetier.experiments.report.payload import hues
from moetier.experiments.sweep import PlotConfig
from moetier.traces.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

FIGURES = "figures"
"""The folder beside the report that they go to."""


def draw_static(
    folder: Folder, bars: Sequence[Entry], x: str | None, y: str | None, out: Path
) -> tuple[list[Path], list[str]]:
    """Draw what the report shows into the folder *out*; return the files, and what was not drawn.

    *x* and *y* are the report's first axes, *bars* the points that its breakdowns show. A figure
    that cannot be drawn is no reason to fail; the second list says which and why.
    """
    try:
        out.mkdir(exist_ok=True)
    except OSError as error:
        return [], [f"{out}: cannot be made: {error.strerror}"]
    made: list[Path] = []
    problems: list[str] = []
    done = folder.done
    hue = next(iter(hues(list(done[0].axes), done)), None) if done else None
    if x is not None and y is not None and len(done) > 1:
        both = about(x).better is not None and about(y).better is not None
        kind: Any = "pareto" if both else "scatter"
        plot = PlotConfig(kind=kind, x=_drawn(x, done), y=_drawn(y, done), hue=hue)
        _draw(done, plot, folder.name, out, made, problems)
    if bars and any(name.startswith("time_breakdown_ms.") for name in bars[0].metrics):
        named = [
            replace(entry, axes={**entry.axes, "policy": _wrapped(entry.policy)}) for entry in bars
        ]
        _draw(named, PlotConfig(kind="breakdown"), folder.name, out, made, problems)
    curves = lines_of(done)
    if curves is not None:
        tier, lines = curves
        size = f"expert cache in {tier}, share of all expert bytes"
        points = [
            replace(
                entry, axes={"curve": name}, metrics={**entry.metrics, size: share(entry, tier)}
            )
            for name, own in lines.items()
            for entry in own
        ]
        plot = PlotConfig(kind="line", x=size, y=RATE, hue="curve")
        _draw(points, plot, folder.name, out, made, problems)
    if folder.validation is not None:
        _validation(folder, out / "validation.png", made, problems)
    return [file for path in made for file in (path, path.with_suffix(".pdf"))], problems


def _drawn(name: str, entries: Sequence[Entry]) -> str:
    """Return the column that stands for *name* in a figure: a cache's size as configs spell it."""
    spelled = name.replace("capacity_bytes.", "capacity.")
    return spelled if all(entry.axes.get(spelled) is not None for entry in entries) else name


def _wrapped(text: str) -> str:
    """Return *text* in at most two lines of a figure's margin."""
    return textwrap.fill(text, 52, max_lines=2, placeholder=" …")


def table_of(entries: Sequence[Entry]) -> pd.DataFrame:
    """Return *entries* as a table like the results of a sweep."""
    import pandas as pd

    rows = [
        {
            "policy": entry.policy,
            **entry.axes,
            "status": entry.status,
            "error": entry.error,
            **entry.metrics,
            "key": entry.key,
        }
        for entry in entries
    ]
    return pd.DataFrame(rows)


def _draw(
    entries: Sequence[Entry],
    plot: PlotConfig,
    title: str,
    out: Path,
    made: list[Path],
    problems: list[str],
) -> None:
    table = table_of(entries)
    told = [name for name in table.columns if str(name).startswith("policy.")]
    try:
        made += draw_all(table.drop(columns=told), [plot], out, title)
    except InputError as error:
        problems.append(f"{plot.kind}: {error}")


def _validation(folder: Folder, path: Path, made: list[Path], problems: list[str]) -> None:
    from moetier.experiments.validation_figure import draw
    from moetier.validate.compare.grid import Point

    assert folder.validation is not None
    try:
        names = [one.name for one in fields(Point)]
        points = [
            Point(**{name: point.get(name) for name in names})
            for point in folder.validation["points"]
        ]
        draw(points, path, f"{folder.name}: simulated against measured")
    except (InputError, KeyError, TypeError, ValueError) as error:
        problems.append(f"validation: {error}")
    else:
        made.append(path)
