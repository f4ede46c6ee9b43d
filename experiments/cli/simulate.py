"""This module is `moetier simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moetier.experiments.cli.options import Config, Json, Set

if TYPE_CHECKING:
    from moetier.experiments.config import RunConfig


def simulate(
    config: Config,
    set_: Set = None,
    json_: Json = False,
    timeline: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace to FILE (opens in Perfetto).")
    ] = None,
    headroom: Annotated[
        bool, typer.Option("--headroom", help="Also say what is left to win, and in what.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the records (Parquet), result and config.")
    ] = None,
) -> None:
    """Simulate one run: a source of routing, a machine, a policy."""
    from moetier.experiments.cli.show import show_run
    from moetier.experiments.config import load_run
    from moetier.experiments.runs import run
    from moetier.experiments.store import dump_json, new_folder, write_run

    run_config = load_run(config, set_)
    left = _headroom(run_config, str(config)) if headroom else {}
    if out is None:
        result = run(run_config, where=str(config), timeline=timeline)
    else:
        with new_folder(out):
            records = out / "records.parquet"
            result = run(run_config, where=str(config), records=records, timeline=timeline)
            write_run(out, result | left)
    if json_:
        typer.echo(dump_json(result | left))
    else:
        show_run(result)
        _show_headroom(left)


def _headroom(config: RunConfig, where: str) -> dict[str, Any]:
    from moetier.experiments.headroom import headroom

    return {"headroom": headroom(config, where=where)}


def _show_headroom(left: dict[str, Any]) -> None:
    from moetier.experiments.cli.show import show_table
    from moetier.experiments.headroom import rows_of

    if left:
        rows = rows_of(left["headroom"])
        show_table(rows, list(rows[0]))


def add_to(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command()(simulate)
