"""This module holds the arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Argument(help="YAML file; experiments/configs/ has examples.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a key: --set capacity.dram='25 %'. Repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout, and nothing else.")]
