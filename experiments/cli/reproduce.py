"""This module is `moetier reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moetier.experiments.cli.options import Json

COLUMNS = ["paper", "name", "published", "ours", "low", "high", "ratio", "kind", "verdict"]


def reproduce(
    paper: Annotated[str, typer.Argument(help="Name of a paper, or `all`.")],
    json_: Json = False,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write them as a Markdown document.")
    ] = None,
) -> None:
    """Recompute published figures: published, ours, their ratio, and what was assumed."""
    from moetier.experiments.cli.show import show_table
    from moetier.experiments.papers import paper_names
    from moetier.experiments.papers import reproduce as recompute
    from moetier.experiments.store import dump_json
    from moetier.traces.errors import InputError, nearest

    known = paper_names()
    if paper != "all" and paper not in known:
        hint = nearest(paper, known)
        raise InputError(
            f"unknown paper '{paper}'", way_out=f"{hint}known: {', '.join(known)}, all"
        )
    rows = [
        {"paper": name, **row.model_dump()}
        for name in (known if paper == "all" else [paper])
        for row in recompute(name)
    ]
    if write is not None:
        from moetier.experiments.reproduction import document
        from moetier.experiments.store import write_text

        write_text(write, document(rows))
    if json_:
        typer.echo(dump_json(rows))
        return
    show_table(rows, COLUMNS)
    for row in rows:
        about = f": {row['reason']}" if row["reason"] else ""
        typer.echo(f"{row['name']}: {row['what']}{about}")
    for text in dict.fromkeys(text for row in rows for text in row["assumptions"]):
        typer.echo(f"assumed: {text}")


def add_to(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command()(reproduce)
