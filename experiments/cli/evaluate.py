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
    lm_eval: Annotated[
        list[str] | None,
        typer.Option(
            "--lm-eval",
            help="Ask this task of lm-evaluation-harness (a name or a task YAML) instead. "
            "Repeatable; --items is then documents of each task.",
        ),
    ] = None,
    fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples before each document of --lm-eval.")
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            help="What performs the run: `simulated` time, a real `disk` from which the experts "
            "are read, or a GPU (`cuda`); the same as machine.kind."
        ),
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
    if items is not None and not lm_eval:
        overrides.append(f"evaluate.items={items}")
    if machine is not None:
        overrides.append(f"machine.kind={machine}")
    run_config = load_run(config, overrides)
    if run_config.live is None:
        raise InputError(
            "names no live model, so there is nothing to ask",
            where=config,
            way_out="give `live: moe-tiny` or a checkpoint folder, or use `moetier simulate`",
        )
    given: dict[str, Any] = {"where": str(config)}
    if lm_eval:
        given["tasks"] = _tasks(lm_eval, items, fewshot, run_config.seed)
    with bar("evaluate") as given["progress"]:
        if out is None:
            result, failure = run_live(run_config, **given)
        else:
            with new_folder(out):
                records = out / "records.parquet"
                result, failure = run_live(run_config, records=records, **given)
                write_run(out, result)
    if json_:
        typer.echo(dump_json(result))
    else:
        _show(result)
    if failure is not None:
        typer.echo(f"error: {failure}", err=True)
        raise typer.Exit(1)


def _tasks(names: list[str], limit: int | None, fewshot: int | None, seed: int) -> Any:
    from moetier.experiments.live_runs import check_installed

    check_installed()
    from moetier.validate.lm_eval import Tasks

    return Tasks(tuple(names), limit, fewshot, seed)


def _show(result: dict[str, Any]) -> None:
    from moetier.experiments.cli.show import show_run, show_table

    show_run(result)
    if result["accuracy_by_task"]:
        rows = [{"task": task, **value} for task, value in result["accuracy_by_task"].items()]
        show_table(rows, ["task", "mean", "standard_error", "n"])
    if result.get("lm_eval"):
        rows = [
            {"task": task, "metric": name, **value, "difference": _interval(value["difference"])}
            for task, metrics in result["lm_eval"].items()
            for name, value in metrics.items()
        ]
        show_table(rows, ["task", "metric", "value", "stderr", "plain", "difference"])
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


def _interval(change: dict[str, Any] | None) -> str:
    if change is None:
        return "not known"
    return f"{change['mean']:+.4f} ({change['low']:+.4f} to {change['high']:+.4f})"


def add_to(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command()(evaluate)
