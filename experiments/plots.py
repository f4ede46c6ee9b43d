"""This module draws the figures of a sweep, each with the table it was drawn from beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetier.experiments.bars import breakdown
from moetier.experiments.canvas import new_figure, palette, place_legend, save
from moetier.experiments.figure_data import (
    Axis,
    axis,
    check_column,
    differing,
    done_rows,
    entry,
    groups,
)
from moetier.experiments.files import inside
from moetier.experiments.pareto import front
from moetier.experiments.store import write_text
from moetier.traces.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from moetier.experiments.sweep import PlotConfig

ARROWS = {"lower": "← lower is better", "higher": "higher is better →"}
"""On the vertical axis the text is turned, so that ← points down and → up."""

FAINT = {"s": 26, "alpha": 0.4, "lw": 0}
SOLID = {"s": 46}
NOTED = 12  # points of a front that get a note each
APART = (0.16, 0.05)  # shares of the figure's width and height that two notes need


def draw_all(
    table: pd.DataFrame,
    plots: Sequence[PlotConfig],
    folder: Path,
    title: str,
    on_refusal: Callable[[InputError], None] | None = None,
) -> list[Path]:
    """Draw *plots* of the results *table* into *folder* and return the figures' paths.

    A figure is called after its kind; later ones of a kind are numbered: pareto.png, pareto-2.png.
    With *on_refusal*, which hears of each that cannot be drawn, the others still are.

    Raises:
        InputError: If a plot names a column that is not there, or nothing can be drawn.
    """
    rows = done_rows(table)
    seen: dict[str, int] = {}
    made = []
    for at, plot in enumerate(plots):
        seen[plot.kind] = seen.get(plot.kind, 0) + 1
        number = "" if seen[plot.kind] == 1 else f"-{seen[plot.kind]}"
        path = folder / f"{plot.kind}{number}.png"
        try:
            with inside(f"plots.{at}"):
                drawn = _KINDS[plot.kind](rows, plot, path, title)
        except InputError as error:
            if on_refusal is None:
                raise
            on_refusal(error)
            continue
        write_text(path.with_suffix(".csv"), drawn.to_csv(index=False, lineterminator="\n"))
        made.append(path)
    return made


def _pareto(rows: pd.DataFrame, plot: PlotConfig, path: Path, title: str) -> pd.DataFrame:
    x, y, hue = _axes(rows, plot)
    for name, one in (("x", x), ("y", y)):
        if one.better is None:
            raise InputError(
                f"{name}: '{getattr(plot, name)}' has no better direction",
                way_out="use `kind: scatter` or `kind: line`, or another column",
            )
    ways: Any = [x.better, y.better]
    points = [(_nan(a), _nan(b)) for a, b in zip(x.values, y.values, strict=True)]
    on = front(points, ways)
    figure, ax = new_figure()
    edge = sorted({points[i] for i in range(len(points)) if on[i]})
    if len(edge) > 1:
        ax.plot(*zip(*edge, strict=True), color="0.35", lw=1.2, zorder=1, label="front of all")
    for (name, members), (color, marker) in zip(groups(rows, hue), palette(), strict=False):
        ax.scatter([], [], color=color, marker=marker, label=name or None, **SOLID)  # the legend
        _whiskers(ax, x, y, members, color)
        own = front([points[i] for i in members], ways)
        path_of = sorted({points[i] for i, best in zip(members, own, strict=True) if best})
        if hue is not None and len(path_of) > 1:
            ax.plot(*zip(*path_of, strict=True), color=color, lw=0.8, alpha=0.45, zorder=1)
        for chosen, style in ((False, FAINT), (True, SOLID)):
            at = [points[i] for i in members if on[i] is chosen]
            xs, ys = [p[0] for p in at], [p[1] for p in at]
            ax.scatter(xs, ys, color=color, marker=marker, zorder=2 + chosen, **style)
    if not all(on):
        ax.scatter([], [], color="0.4", label="dominated", **FAINT)
    _note(ax, rows, plot, points, on)
    _finish(ax, x, y, hue, title)
    save(figure, path)
    return _columns(rows, plot, {"on_front": on})


def _whiskers(ax: Any, x: Axis, y: Axis, members: Sequence[int], color: Any) -> None:
    """Draw how far the values of *members* may be off, where that is known."""
    if y.errors is None or not members:
        return
    below, above = zip(*(y.errors[i] for i in members), strict=True)
    at = [_nan(x.values[i]) for i in members], [_nan(y.values[i]) for i in members]
    ax.errorbar(*at, yerr=(below, above), fmt="none", ecolor=color, elinewidth=0.8, alpha=0.5)


def _note(
    ax: Any,
    rows: pd.DataFrame,
    plot: PlotConfig,
    points: list[tuple[float, float]],
    on: list[bool],
) -> None:
    """Write beside each point of a short front what else was chosen there, such as its capacity."""
    others = [
        name
        for name in differing(rows)
        if name not in (plot.hue, plot.x, plot.y) and not (name == "policy" and plot.hue is None)
    ]
    if not others or sum(on) > NOTED:
        return
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    noted: list[tuple[float, float]] = []
    for i, point in enumerate(points):
        if not on[i]:
            continue
        at = (point[0] - left) / (right - left), (point[1] - bottom) / (top - bottom)
        if all(abs(at[0] - x) > APART[0] or abs(at[1] - y) > APART[1] for x, y in noted):
            noted.append(at)
            text = ", ".join(entry(name, rows[name][i]) for name in others)
            ax.annotate(
                text,
                point,
                xytext=(6, 5),
                textcoords="offset points",
                fontsize="x-small",
                color="0.25",
            )


def _scatter(rows: pd.DataFrame, plot: PlotConfig, path: Path, title: str) -> pd.DataFrame:
    return _xy(rows, plot, path, title, lines=False)


def _line(rows: pd.DataFrame, plot: PlotConfig, path: Path, title: str) -> pd.DataFrame:
    return _xy(rows, plot, path, title, lines=True)


def _xy(
    rows: pd.DataFrame, plot: PlotConfig, path: Path, title: str, *, lines: bool
) -> pd.DataFrame:
    x, y, hue = _axes(rows, plot)
    figure, ax = new_figure()
    for (name, members), (color, marker) in zip(groups(rows, hue), palette(), strict=False):
        known = [i for i in members if x.values[i] is not None and y.values[i] is not None]
        at = sorted((_nan(x.values[i]), _nan(y.values[i])) for i in known)
        xs, ys = [p[0] for p in at], [p[1] for p in at]
        _whiskers(ax, x, y, known, color)
        style = {"lw": 1.4 if lines else 0, "ms": 6, "color": color, "marker": marker}
        ax.plot(xs, ys, label=name or None, **style)
    _finish(ax, x, y, hue, title)
    save(figure, path)
    drawn = _columns(rows, plot, {})
    return drawn.assign(_at=x.values).sort_values("_at", kind="stable").drop(columns="_at")


def _breakdown(rows: pd.DataFrame, plot: PlotConfig, path: Path, title: str) -> pd.DataFrame:
    return breakdown(rows, plot, path, title)


_KINDS: dict[str, Callable[[Any, Any, Path, str], Any]] = {
    "pareto": _pareto,
    "scatter": _scatter,
    "line": _line,
    "breakdown": _breakdown,
}


def _axes(rows: pd.DataFrame, plot: PlotConfig) -> tuple[Axis, Axis, str | None]:
    x = axis(rows, check_column(rows, plot.x, "x"))
    y = axis(rows, check_column(rows, plot.y, "y"))
    for name, one in (("x", x), ("y", y)):
        if all(value is None for value in one.values):
            raise InputError(f"{name}: '{getattr(plot, name)}' is null in every row")
    return x, y, None if plot.hue is None else check_column(rows, plot.hue, "hue")


def _columns(rows: pd.DataFrame, plot: PlotConfig, more: dict[str, Any]) -> pd.DataFrame:
    names = dict.fromkeys(n for n in (plot.hue, "policy", plot.x, plot.y, "key") if n is not None)
    return rows[list(names)].assign(**more)


def _finish(ax: Any, x: Axis, y: Axis, hue: str | None, title: str) -> None:
    ax.set_title(f"{title}: {_bare(y.title)} against {_bare(x.title)}", fontsize="medium")
    ax.set_xlabel("\n".join(filter(None, [x.title, ARROWS.get(x.better or "")])))
    ax.set_ylabel("\n".join(filter(None, [y.title, ARROWS.get(y.better or "")])))
    for one, setter in ((x, ax.set_xticks), (y, ax.set_yticks)):
        if one.ticks is not None:
            setter([at for at, _ in one.ticks], [name for _, name in one.ticks])
    place_legend(ax, hue)


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _bare(title: str) -> str:
    """Return an axis title without its unit."""
    return title.partition(" (")[0]
