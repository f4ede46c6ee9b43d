"""This module is the command line. It imports no command's code before that command runs."""

from __future__ import annotations

import signal
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import moetier
from moetier.experiments.cli import (
    bench,
    calibrate,
    capture,
    evaluate,
    listing,
    report,
    reproduce,
    search,
    simulate,
    sweep,
    trace,
    train,
    validate,
)
from moetier.traces.errors import InputError


class _Group(TyperGroup):
    """Turns bad input into a message on stderr and exit status 2, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except InputError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    name="moetier",
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Say which experts of a Mixture-of-Experts model should live in which memory, and when.",
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(moetier.__version__)
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Take the options that come before a command."""


for _module in (
    capture, trace, train, simulate, evaluate, sweep, search, report, calibrate, validate,
    reproduce, listing, bench,
):  # fmt: skip
    _module.add_to(app)


def main() -> None:
    """Run the command line; a SIGTERM ends it as an error would, so that nothing is left behind."""
    signal.signal(signal.SIGTERM, _terminate)
    app()


def _terminate(number: int, _frame: Any) -> None:
    raise SystemExit(128 + number)
