"""This module is `moetier report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a sweep, search, validation or run (--out).")
    ],
    out: Annotated[
        Path | None, typer.Option(help="HTML file to write. Default: report.html in the folder.")
    ] = None,
    timelines: Annotated[
        int, typer.Option(min=0, help="Points to simulate again for a timeline.")
    ] = 3,
    timeline_of: Annotated[
        list[str] | None,
        typer.Option(help="Also the point whose content key begins so. Repeatable."),
    ] = None,
    static: Annotated[
        bool, typer.Option("--static/--no-static", help="Also draw PNG and PDF figures.")
    ] = True,
) -> None:
    """Write one self-contained HTML file about a folder of results."""
    from moetier.experiments.report.build import write_report

    written = write_report(
        folder, out, timelines=timelines, timeline_of=timeline_of or (), static=static
    )
    for text in written.problems:
        typer.echo(f"not drawn: {text}", err=True)
    for path in written.figures:
        typer.echo(path)
    typer.echo(written.page)


def add_to(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command()(report)
