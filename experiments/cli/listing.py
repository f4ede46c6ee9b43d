"""This module is `moetier list`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from moetier.experiments.cli.options import Json

Kind = Literal["policies", "hardware", "models", "predictors", "importers"]


def list_(kind: Annotated[Kind, typer.Argument(help="What to list.")], json_: Json = False) -> None:
    """List what is there: policies and their parts, machines, models, predictors, importers."""
    from moetier.experiments.catalogue import KINDS
    from moetier.experiments.store import dump_json

    found = KINDS[kind]()
    if json_:
        typer.echo(dump_json(found))
    elif found:
        _print(found)
    else:
        typer.echo(f"no {kind} yet")


def _print(found: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for entry in found:
        by_kind.setdefault(entry["kind"], []).append(entry)
    for kind, entries in by_kind.items():
        table = Table(
            title=kind, title_justify="left", title_style="bold", box=None, pad_edge=False
        )
        for name in ("name", "what it does", "parameters"):
            table.add_column(name, overflow="fold")
        for entry in entries:
            default = " (default)" if entry.get("default") else ""
            table.add_row(
                escape(entry["name"]) + default,
                escape(entry["summary"]),
                escape(", ".join(_parameter(p) for p in entry.get("parameters", []))),
            )
        if not any(entry.get("parameters") for entry in entries):
            table.columns[2].header = ""
        console.print(table)
        console.print()


def _parameter(parameter: dict[str, Any]) -> str:
    default = "" if parameter["default"] is None else f" = {parameter['default']}"
    return f"{parameter['name']}: {parameter['type']}{default}"


def add_to(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command("list")(list_)
