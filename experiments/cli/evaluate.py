"""This module is `moetier evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moetier.experiments.cli.options import Config, Json, Set


def evaluate(
    config: Config,
    set_: Set = None,
    json_: Json = False,
    items: Annotated[
        int | None, typer.Option(min=1, help="Questions to ask; the same as evaluate.items.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the records (Parquet), result and config.")
    ] = None,
) -> None:
    """Run a policy inside a live model: accuracy, and the figures of `simulate`."""
    from moetier.experiments.cli.progress import bar
    from moetier.experiments.config import load_run
    from moetier.experiments.live_runs import run_live
    from moetier.experiments.store import dump_json, new_folder, write_run
    from moetier.traces.errors import InputError

    overrides = list(set_ or [])
    if items is not None:
        overrides.append(f"evaluate.items={items}")
    run_config = load_run(config, overrides)
    if run_config.live is None:
        raise InputError(
            "names no live model, so there is nothing to ask",
            where=config,
            way_out="give `live: moe-tiny` or a checkpoint folder, or use `moetier simulate`",
        )
    with bar("evaluate") as progress:
        if out is None:
            result, failure = run_live(run_config, where=str(config), progress=progress)
        else:
            with new_folder(out):
                records = out / "records.parquet"
                result, failure = run_live(
                    run_config, where=str(config), records=records, progress=progress
                )
                write_run(out, result)
    if json_:
        typer.echo(dump_json(result))
    else:
        _show(result)
    if failure is not None:
        typer.echo(f"error: {failure}", err=True)
        raise typer.Exit(1)


def _show(result: dict[str, Any]) -> None:
    from moetier.experiments.cli.show import show_run, show_table

    show_run(result)
    if result["accuracy_by_task"]:
        rows = [{"task": task, **value} for task, value in result["accuracy_by_task"].items()]
        show_table(rows, ["task", "mean", "standard_error", "n"])
    for name, unit in (("accuracy", ""), ("nll", " nats per answer")):
        value, change = result[name], result[f"{name}_difference"]
        if value is not None:
            typer.echo(
                f"{name} {value:.4f} ± {result[f'{name}_se']:.4f}{unit}; against the plain model "
                f"{change['mean']:+.4f} ({change['low']:+.4f} to {change['high']:+.4f}, 95 %)"
            )
    if result["repetition_share"] is not None:
        plain = result["plain"]["repetition_share"]
        typer.echo(f"loops in long texts: {result['repetition_share']:.1%}, plain {plain:.1%}")


def add_to(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command()(evaluate)
