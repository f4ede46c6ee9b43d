"""This module gives the series of a report colours, markers and dashes that all can tell apart."""

from __future__ import annotations

import html
import textwrap

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
"""Okabe and Ito's, but for black and yellow, which a dark and a light page would swallow."""

SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x", "star")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")


def look(at: int) -> tuple[str, str, str]:
    """Return colour, marker and dash of series number *at*.

    Seven colours and eight markers have no common factor, so that 56 series differ in one of them.
    """
    dash = DASHES[at // len(COLORS) % len(DASHES)]
    return COLORS[at % len(COLORS)], SYMBOLS[at % len(SYMBOLS)], dash


def label(text: str, width: int = 30, lines: int = 3) -> str:
    """Return *text* for Plotly, which reads a little HTML: escaped, and wrapped to *lines*."""
    found = textwrap.wrap(text, width) or [""]
    if len(found) > lines:
        found = [*found[: lines - 1], found[lines - 1][: width - 1] + "…"]
    return "<br>".join(html.escape(line, quote=False) for line in found)
