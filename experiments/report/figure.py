"""This module is what every figure of a report has: what Plotly draws, and the same as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Table:
    """A table for people who read figures as text; cells are texts already."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    """A figure: traces and layout for Plotly, a sentence that stands for it, and its table."""

    name: str  # its id in the page
    title: str
    alt: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    table: Table
    notes: list[str] = field(default_factory=list)

    def spec(self) -> dict[str, Any]:
        """Return what the page's script draws."""
        return {"traces": self.traces, "layout": self.layout}


UNKNOWN = "-"
"""What a table has where nothing is known, as in the tables of the command line."""


def number(value: Any) -> str:
    """Return *value* for a table, to four digits at least; what is not known is a dash."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def percent(value: float | None, digits: int = 1) -> str:
    """Return the share *value* for a table."""
    return UNKNOWN if value is None else f"{value:.{digits}%}"
