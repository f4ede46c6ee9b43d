"""This module is `moetier calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from moetier.sim.policy.base import Precision


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
    lanes: Annotated[
        int, typer.Option(min=1, help="Threads that read, or streams that copy, at once.")
    ] = 4,
    pace: Annotated[
        str | None, typer.Option(help='Hold each lane to a rate, such as "100 MB/s".')
    ] = None,
    threads: Annotated[int, typer.Option(min=1, max=256, help="Threads that compute.")] = 1,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="Also time experts as a policy's precision stores them: a part such as "
            "'{kind: uniform, bits: 4}', or a preset. Repeatable."
        ),
    ] = None,
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
    precisions = [_precision(text) for text in precision or ()]
    with bar("calibrate") as progress:
        measure(
            machine, out, geometry, weights, folder,
            seconds=seconds, on_progress=progress, lanes=lanes, pace=held, threads=threads,
            precisions=precisions,
        )  # fmt: skip
    typer.echo(out)


def _precision(text: str) -> Precision:
    """Return the part that *text* names or describes, or that of the preset *text*."""
    from moetier.experiments.files import inside
    from moetier.experiments.overrides import apply_overrides
    from moetier.sim.policy.compose import compose, presets

    with inside("--precision"):
        policy = apply_overrides({}, [f"precision={text}"])
        return compose(text if text in presets() else policy).precision


def add_to(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command()(calibrate)
