"""This module is `moetier capture`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def capture(
    model: Annotated[str, typer.Option(help="Checkpoint folder, or id of a model on the hub.")],
    prompts: Annotated[
        Path, typer.Option(help=".txt (a prompt a line) or .jsonl of {prompt: ...}.")
    ],
    out: Annotated[Path, typer.Option(help="The trace to write (.parquet).")],
    hidden: Annotated[
        bool, typer.Option("--hidden", help="Also store what each router read, for training.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate per prompt.")] = 64,
    device_map: Annotated[
        str | None, typer.Option(help='As in transformers, such as "auto".')
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that run together.")] = 1,
    seed: Annotated[int, typer.Option(help="Of a model that draws random numbers.")] = 0,
    predictor: Annotated[
        str | None,
        typer.Option(help="Also record what it predicts: a checkpoint, or an untrained kind."),
    ] = None,
) -> None:
    """Run a model on prompts and record which experts its routers choose."""
    import importlib.util

    from moetier.experiments.cli.progress import bar
    from moetier.traces.capture import capture_model
    from moetier.traces.errors import InputError

    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise InputError(
                f"capture needs {package}, which is not installed",
                way_out="`pip install moetier[models]`",
            )
    with bar("capture") as progress:
        capture_model(
            model, prompts, out,
            hidden=hidden, max_new_tokens=max_new_tokens, device_map=device_map,
            batch_size=batch_size, seed=seed, predictor=predictor, progress=progress,
        )  # fmt: skip
    typer.echo(out)


def add_to(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command()(capture)
