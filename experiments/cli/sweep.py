"""This module is `moetier sweep` and `moetier plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from moetier.experiments.cli.options import Config, Set

Out = Annotated[Path | None, typer.Option(help="Folder of the sweep. Default: out/NAME.")]


def sweep(
    config: Config,
    set_: Set = None,
    out: Out = None,
    jobs: Annotated[int, typer.Option(help="Processes; -1 for one per core.")] = 1,
    backend: Annotated[
        Literal["loky", "dask", "ray"], typer.Option(help="Where the processes run.")
    ] = "loky",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count and estimate.")] = False,
) -> None:
    """Run every point of a sweep; what is already there is not run again."""
    from moetier.experiments.cli.progress import bar
    from moetier.experiments.cli.show import show_sweep
    from moetier.experiments.perform import check_backend
    from moetier.experiments.sweep import OUT, check_plots, load_sweep, points_of, run_sweep
    from moetier.traces.errors import InputError

    if jobs == 0 or jobs < -1:
        raise InputError(f"{jobs} processes", where="--jobs", way_out="1 or more, or -1")
    loaded = load_sweep(config, set_)
    check_backend(backend)
    points = points_of(loaded, str(config))
    check_plots(loaded, points, str(config))
    folder = out if out is not None else Path(OUT) / loaded.name
    if dry_run:
        _dry_run(points, folder, jobs, loaded.records)
        return
    with bar(loaded.name) as on_done:
        outcome = run_sweep(loaded, points, folder, jobs=jobs, backend=backend, on_done=on_done)
    show_sweep(outcome)
    if loaded.plots:
        _draw(loaded, folder)
    if outcome.failed:
        raise typer.Exit(1)


def plot(
    where: Annotated[Path, typer.Argument(help="Folder of a sweep, or its YAML file.")],
    out: Out = None,
) -> None:
    """Draw the figures of a sweep, each with its table (CSV) beside it."""
    from moetier.experiments.files import find_file, inside
    from moetier.experiments.plots import draw_all
    from moetier.experiments.store import SWEEP, Store
    from moetier.experiments.sweep import OUT, load_sweep
    from moetier.traces.errors import InputError

    found = find_file(where)
    file = found / SWEEP if found.is_dir() else found
    config = load_sweep(file)
    folder = out or (found if found.is_dir() else Path(OUT) / config.name)
    table = Store(folder).results()
    if not config.plots:
        raise InputError("names no plots", where=file, way_out="add `plots:`")
    with inside(file):
        for path in draw_all(table, config.plots, folder, config.name):
            typer.echo(path)


def _draw(config: Any, folder: Path) -> None:
    """Draw what can be drawn; a figure that cannot is no reason to fail a sweep that is done."""
    from moetier.experiments.plots import draw_all
    from moetier.experiments.store import Store
    from moetier.traces.errors import InputError

    def refused(error: InputError) -> None:
        typer.echo(f"not drawn: {error}", err=True)

    try:
        table = Store(folder).results()
        for path in draw_all(table, config.plots, folder, config.name, refused):
            typer.echo(path)
    except InputError as error:
        refused(error)


def _dry_run(points: list[Any], folder: Path, jobs: int, records: bool) -> None:
    from moetier.experiments.estimate import estimate_s
    from moetier.experiments.perform import is_done
    from moetier.experiments.store import Store

    unique = {point.key: point for point in points}
    todo = [p for p in unique.values() if not is_done(Store(folder), p.key, records)]
    typer.echo(f"{len(unique)} points, {len(unique) - len(todo)} of them done in {folder}")
    if todo:
        seconds = estimate_s(todo, jobs)
        text = _unknown(todo) if seconds is None else spell_s(seconds)
        typer.echo(f"estimated time: {text}")


def _unknown(points: list[Any]) -> str:
    live = any(point.config.live is not None for point in points)
    return f"unknown: {'a live model runs' if live else 'the points tried failed'}"


def spell_s(seconds: float) -> str:
    """Return *seconds* for reading."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 1 else "under 1 s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def add_to(app: typer.Typer) -> None:
    """Add the commands to *app*."""
    app.command()(sweep)
    app.command()(plot)
