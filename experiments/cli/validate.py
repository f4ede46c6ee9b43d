"""This module is `moetier validate`."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from moetier.experiments.cli.options import Config, Json, Set

if TYPE_CHECKING:
    from moetier.experiments.verdict import Validation

COLUMNS = [
    "policy", "capacity", "decisions", "bytes", "simulated ms", "measured ms", "error", "spread",
    "stall", "attribution",
]  # fmt: skip


def validate(
    config: Config,
    set_: Set = None,
    json_: Json = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for result, table, figure. Default: out/NAME.")
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(help="Also write the first point, simulated and measured, for Perfetto."),
    ] = None,
) -> None:
    """Hold simulations against real runs of the same policies; exit 1 if they differ too much."""
    from moetier.experiments.cli.progress import bar
    from moetier.experiments.store import dump_json, new_folder, write_text
    from moetier.experiments.sweep import OUT
    from moetier.experiments.validation import validate as compare
    from moetier.experiments.validation_config import load_validation

    loaded = load_validation(config, set_)
    folder = out if out is not None else Path(OUT) / loaded.name
    with new_folder(folder):
        found = compare(loaded, folder, bar=bar, timeline=timeline)
        write_text(folder / "validation.json", dump_json(found.as_dict()) + "\n")
        write_text(folder / "points.csv", found.as_csv())
        _draw(found, folder)
    if json_:
        typer.echo(dump_json(found.as_dict()))
    else:
        _show(found)
    if found.missed:
        for text in found.missed:
            typer.echo(f"missed: {text}", err=True)
        raise typer.Exit(1)


def _draw(found: Validation, folder: Path) -> None:
    from importlib.util import find_spec

    from moetier.experiments.validation_figure import draw

    if find_spec("matplotlib") is not None:
        title = f"{found.name}: simulated against measured on {found.profile.name}"
        draw(found.points, folder / "validation.png", title)


def _show(found: Validation) -> None:
    from moetier.experiments.cli.show import show_table

    rows = [
        {
            "policy": point.policy,
            "capacity": ", ".join(point.capacity.values()),
            "decisions": "equal" if point.decision_log_equal else point.first_difference,
            "bytes": "equal" if point.bytes_equal else "differ",
            "simulated ms": f"{point.tpot_sim_ms:.2f}",
            "measured ms": f"{point.timed.median:.2f}",
            "error": f"{point.error:+.1%}",
            "spread": f"{point.spread:.1%}",
            "stall": f"{median(point.stall_share_measured):.0%}",
            "attribution": ", ".join(
                f"{name} {value:+.1f}" for name, value in (point.attribution_ms or {}).items()
            ),
        }
        for point in found.points
    ]
    show_table(rows, COLUMNS)
    summary = found.summary
    tau = "none" if summary.kendall_tau is None else f"{summary.kendall_tau:.3f}"
    typer.echo(
        f"median error {summary.median_error:.1%}, 90th percentile {summary.p90_error:.1%} (beyond "
        f"spread {summary.median_error_beyond_spread:.1%} and "
        f"{summary.p90_error_beyond_spread:.1%}), Kendall's tau {tau} "
        f"({summary.ranking.ties} pairs tied); stall of 30 % or more in {summary.stalled} of "
        f"{len(rows)} points; attribution in ms, measured less simulated"
    )
    others = found.load.others_share
    if others is not None:
        typer.echo(f"while it ran, other processes used {others:.0%} of {found.load.cores} cores")
    for name, noticed in found.would_notice.items():
        typer.echo(f"a simulation with {name} {'fails' if noticed else 'would pass too'}")
    for text in found.known_limitations:
        typer.echo(f"known: {text}")


def add_to(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command()(validate)
