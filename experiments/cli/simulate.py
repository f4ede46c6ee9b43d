"""This module is `moetier simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moetier.experiments.cli.options import Config, Json, Set


def simulate(
    config: Config,
    set_: Set = None,
    json_: Json = False,
    timeline: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace to FILE (opens in Perfetto).")
    ] = None,
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
    if out is None:
        result = run(run_config, where=str(config), timeline=timeline)
    else:
        with new_folder(out):
            records = out / "records.parquet"
            result = run(run_config, where=str(config), records=records, timeline=timeline)
            write_run(out, result)
    if json_:
        typer.echo(dump_json(result))
    else:
        show_run(result)


def add_to(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command()(simulate)
