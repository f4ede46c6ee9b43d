"""This module is `moetier search`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from moetier.experiments.cli.options import Config, Json, Set

if TYPE_CHECKING:
    from moetier.experiments.search import Found
    from moetier.experiments.search_config import Search

SHOWN = 20  # rows of the front


def search(
    config: Config,
    set_: Set = None,
    out: Annotated[Path | None, typer.Option(help="Folder. Default: out/NAME.")] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="How many to run, in all.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes; -1 for one per core.")] = 1,
    backend: Annotated[
        Literal["loky", "dask", "ray"], typer.Option(help="Where the processes run.")
    ] = "loky",
    json_: Json = False,
) -> None:
    """Search for the best policies under constraints; what is already there is not run again."""
    from moetier.experiments.cli.progress import bar
    from moetier.experiments.search import run_search
    from moetier.experiments.search_config import load_search
    from moetier.experiments.store import dump_json
    from moetier.experiments.sweep import OUT
    from moetier.traces.errors import InputError

    if jobs == 0 or jobs < -1:
        raise InputError(f"{jobs} processes", where="--jobs", way_out="1 or more, or -1")
    overrides = [*(set_ or []), *([] if trials is None else [f"trials={trials}"])]
    loaded = load_search(config, overrides)
    folder = out if out is not None else Path(OUT) / loaded.config.name
    with bar(loaded.config.name) as on_done:
        found = run_search(loaded, folder, jobs=jobs, backend=backend, on_done=on_done)
    drawn = _draw(loaded, folder)
    if json_:
        typer.echo(dump_json(_said(found)))
    else:
        _show(loaded, found, drawn)
    if found.choice.best is None:
        typer.echo(f"error: {_closest(loaded, found)}", err=True)
    if found.choice.best is None or found.failed:
        raise typer.Exit(1)


def _said(found: Found) -> dict[str, Any]:
    """Return what was found as plain values."""
    return {
        "folder": str(found.folder),
        "trials": found.trials,
        "refused": found.refused,
        "failed": found.failed,
        "left_out": found.left_out,
        "front": found.choice.front,
        "recommended": found.choice.best,
        "rule": found.choice.rule,
        "closest": found.closest,
        "command": found.command,
    }


def _show(loaded: Search, found: Found, drawn: list[str]) -> None:
    from moetier.experiments.cli.show import show_table

    counts = ", ".join(f"{count} {name}" for name, count in found.trials.items() if name != "all")
    typer.echo(f"{found.trials['all']} trials ({counts}): {found.folder}")
    for reason, count in found.refused.items():
        typer.echo(f"refused {count} times: {reason}")
    for part, reason in found.left_out.items():
        typer.echo(f"left out: {part}: {reason}")
    for text in found.failed:
        typer.echo(f"failed: {text}", err=True)
    rows = found.choice.front
    if rows:
        judged = [*(g.name for g in loaded.goals), *(x.name for x in loaded.limits)]
        typer.echo(f"front: {len(rows)} policies{', the first few' * (len(rows) > SHOWN)}")
        show_table([_brief(row, judged) for row in rows[:SHOWN]], list(_brief(rows[0], judged)))
    for path in drawn:
        typer.echo(path)
    if found.choice.best is not None:
        typer.echo(f"recommended ({found.choice.rule}): {found.choice.best['policy']}")
        typer.echo(f"run it again: {found.command}")


def _brief(row: dict[str, Any], judged: list[str]) -> dict[str, Any]:
    from moetier.experiments.search_config import value_of

    figures = {name: row[name] if name in row else value_of(row, name) for name in judged}
    told = {key: value for key, value in row.items() if key.startswith("capacity.")}
    return figures | told | {"policy": row["policy"]}


def _closest(loaded: Search, found: Found) -> str:
    from moetier.experiments.search_config import value_of

    wanted = ", ".join(map(str, loaded.limits))
    if found.closest is None:
        return f"no trial meets {wanted}, and none says how far it is from that"
    row = found.closest
    names = dict.fromkeys(limit.name for limit in loaded.limits)
    has = ", ".join(f"{name} {_number(value_of(row, name))}" for name in names)
    return f"no trial meets {wanted}; the closest has {has}: {row['policy']}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.6g}"


def _draw(loaded: Search, folder: Path) -> list[str]:
    """Draw the first objective against each other one; say why where that cannot be done."""
    from moetier.experiments.plots import draw_all
    from moetier.experiments.search_config import column
    from moetier.experiments.store import Store
    from moetier.experiments.sweep import PlotConfig
    from moetier.traces.errors import InputError

    table = Store(folder).results()
    met = table["feasible"].eq(True)  # null where a run failed
    told = [name for name in table.columns if name.startswith("policy.")]  # too long for notes
    table = (table.loc[met] if any(met) else table).drop(columns=told).reset_index(drop=True)
    first, *others = [
        goal.name if goal.name in table.columns else column(goal.name) for goal in loaded.goals
    ]
    plots = [PlotConfig(kind="pareto", x=first, y=name) for name in others]
    try:
        return [str(path) for path in draw_all(table, plots, folder, loaded.config.name)]
    except InputError as error:
        return [f"not drawn: {error}"]


def add_to(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command()(search)
