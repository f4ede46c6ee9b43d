"""This module is `moetier trace info|validate|convert|export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moetier.experiments.cli.options import Json

File = Annotated[Path, typer.Argument(help="A trace (.parquet).")]

group = typer.Typer(name="trace", no_args_is_help=True, help="Look at, check and convert traces.")


@group.command()
def info(
    trace: File,
    json_: Json = False,
    weights: Annotated[str | None, typer.Option(help="Count bytes in this format.")] = None,
) -> None:
    """Describe a trace: size, reuse, skew, working set."""
    from moetier.experiments.cli.show import show_mapping
    from moetier.experiments.files import find_file
    from moetier.experiments.store import dump_json
    from moetier.traces.info import describe
    from moetier.traces.io import TraceReader

    found = describe(TraceReader(find_file(trace)), weights).as_dict()
    if json_:
        typer.echo(dump_json(found))
    else:
        show_mapping(found)


@group.command()
def validate(trace: File) -> None:
    """Read and check every row; the first one that is wrong is named."""
    from moetier.experiments.files import find_file
    from moetier.traces.io import TraceReader

    rows = TraceReader(find_file(trace)).validate()
    typer.echo(f"{trace}: {rows} rows, all good")


@group.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="The file to read.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The trace to write (.parquet).")],
    from_: Annotated[str, typer.Option("--from", help="Its format: `moetier list importers`.")],
    model: Annotated[
        str | None, typer.Option(help="A published geometry: `moetier list models`.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", help="Another parameter of the importer: key=value."),
    ] = None,
) -> None:
    """Turn what another program wrote into a trace."""
    from moetier.experiments.files import find_file
    from moetier.experiments.overrides import apply_overrides
    from moetier.traces.importers import IMPORTERS

    arguments: dict[str, Any] = apply_overrides({}, option or [])
    if model is not None:
        arguments["model"] = model
    header = IMPORTERS.create(
        from_, {"source": find_file(source), "out": out, **arguments}, where="--from"
    )
    typer.echo(out)
    if header.unknown:
        typer.echo(f"the source does not say: {', '.join(header.unknown)}", err=True)


@group.command()
def export(
    trace: File,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.")],
    format_: Annotated[
        str | None,
        typer.Option(
            "--to",
            "--format",
            help="csv, jsonl or oracle-general (libCacheSim). Default: the ending of OUT.",
        ),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="oracle-general: count bytes in this format.")
    ] = None,
) -> None:
    """Write a trace as CSV, JSON lines or requests to a cache."""
    from moetier.experiments.files import find_file
    from moetier.traces.export import export as write
    from moetier.traces.io import TraceReader
    from moetier.traces.oracle_general import export_oracle_general

    reader = TraceReader(find_file(trace))
    if format_ == "oracle-general":
        typer.echo(f"{out}: {export_oracle_general(reader, out, weights)} requests")
        return
    typer.echo(f"{out}: {write(reader, out, format_)} lines")


def add_to(app: typer.Typer) -> None:
    """Add the group to *app*."""
    app.add_typer(group)
