"""This module is `moetier train-predictor`."""

from __future__ import annotations

from typing import Any

import typer

from moetier.experiments.cli.options import Config, Json, Set


def train_predictor(config: Config, set_: Set = None, json_: Json = False) -> None:
    """Teach a predictor of later layers' routing, and measure it on held-out prompts."""
    from moetier.experiments.cli.progress import bar
    from moetier.experiments.store import dump_json
    from moetier.experiments.training import load_training, train_from

    training = load_training(config, set_)
    with bar("train") as progress:
        result = train_from(training, str(config), progress)
    if json_:
        typer.echo(dump_json(result))
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console

    from moetier.experiments.cli.show import show_table

    console = Console()
    prompts, size = result["prompts"], result["n_parameters"]
    console.print(
        f"[bold]{result['predictor']['kind']}[/] for {result['model']}: {size:,} weights of its "
        f"own, {result['epochs']} epochs on {prompts['train']} prompts",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"measured on {result['n_tokens']} tokens of {prompts['held_out']} other prompts, "
        "the layer being the one that is predicted:",
        highlight=False,
        soft_wrap=True,
    )
    columns = ["recall_at_k", "recall_at_2k", "exact_set", "cosine_r", "cosine_q"]
    rows = [{**row, "layer": str(row["layer"])} for row in result["layers"]]
    means = [{**row, "layer": "mean"} for row in result["means"]]
    show_table([*rows, *means], ["horizon", "layer", *columns], console)
    console.print(result["out"], soft_wrap=True, highlight=False)


def add_to(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command("train-predictor")(train_predictor)
