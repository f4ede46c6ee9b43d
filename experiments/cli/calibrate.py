"""This module is `moetier calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def calibrate(
    machine: Annotated[Literal["disk", "cuda"], typer.Option(help="What to measure.")],
    out: Annotated[Path, typer.Option(help="The profile to write (.yaml).")],
    model: Annotated[
        str, typer.Option(help="Whose experts and dense parts: `moetier list models`.")
    ] = "qwen3-30b-a3b",
    weights: Annotated[str, typer.Option(help="The format they are stored in.")] = "bf16",
    folder: Annotated[
        Path, typer.Option(help="Where the expert file of later runs lies.")
    ] = Path(),
    lanes: Annotated[int, typer.Option(min=1, help="Threads that read at once.")] = 4,
    pace: Annotated[
        str | None, typer.Option(help='Hold each lane to a rate, such as "100 MB/s".')
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads that compute.")] = 1,
    seconds: Annotated[float, typer.Option(min=1, help="How long to measure, about.")] = 120,
) -> None:
    """Measure this machine with micro-benchmarks and write a hardware profile of it."""
    from moetier.experiments.cli.progress import bar
    from moetier.sim.units import parse_rate
    from moetier.traces.geometry import load_geometry
    from moetier.validate.calibrate.run import calibrate as measure
    from moetier.validate.machines.pacing import Pace

    geometry = load_geometry(model)
    held = Pace(parse_rate(pace)) if pace is not None else None
    with bar("calibrate") as progress:
        measure(
            machine, out, geometry, weights, folder,
            seconds=seconds, on_progress=progress, lanes=lanes, pace=held, threads=threads,
        )  # fmt: skip
    typer.echo(out)


def add_to(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command()(calibrate)
