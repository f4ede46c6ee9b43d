"""This module is `moetier bench`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from moetier.experiments.cli.options import Json


def bench(
    json_: Json = False,
    tokens: Annotated[int, typer.Option(min=4, help="Length of the synthetic trace.")] = 1000,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of each measurement.")] = 5,
    long: Annotated[
        bool, typer.Option("--long", help="Also 100,000 tokens and 10,000 points (minutes).")
    ] = False,
) -> None:
    """Measure the simulator's own speed, beside a peer that only counts hits."""
    from moetier.experiments.bench import bench as measure
    from moetier.experiments.store import dump_json

    rows = measure(tokens=tokens, repeats=repeats, long=long)
    if json_:
        typer.echo(dump_json(rows))
    else:
        _show(rows)
    if not all(row.get("within_limit", True) for row in rows):
        raise typer.Exit(1)


_MORE = ("us_per_token", "ns_per_lookup", "seconds", "peak_mb", "ms_per_point", "growth_mb")


def _show(rows: list[dict[str, Any]]) -> None:
    from moetier.experiments.cli.show import show_table

    show_table(rows, ["name", "rate", "unit", "peer_rate", "ratio", "spread", "hit_rate"])
    for row in rows:
        extra = {k: row[k] for k in _MORE if k in row}
        text = ", ".join(f"{key} {value}" for key, value in extra.items())
        typer.echo(f"{row['name']}: {'; '.join(filter(None, [row.get('note', ''), text]))}")


def add_to(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command()(bench)
