"""This module writes published figures beside ours as a document."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from moetier.experiments.papers import load_paper

HEAD = """# Reproduction

Published figures beside ours, written by `moetier reproduce all --write docs/reproduction.md`; do
not edit. *Ours* is a prediction unless it says fitted; its range is over what the source leaves
open. Nothing is rounded towards the published number.
"""
ROW = "| {name} | {published} | {ours} | {ratio} | {verdict} | {what} |"


def document(rows: Sequence[dict[str, Any]]) -> str:
    """Return *rows* of `moetier reproduce --json`, each with its `paper`, as Markdown."""
    parts = [HEAD]
    for name, group in groupby(rows, key=lambda row: row["paper"]):
        paper, found = load_paper(name), list(group)
        parts.append(f"## {paper.title}\n\n{paper.source}. `moetier reproduce {name}`\n")
        parts.append("| figure | published | ours | ratio | verdict | what it is |")
        parts.append("|---|---|---|---|---|---|")
        parts += [_line(row) for row in found]
        about = dict.fromkeys(text for row in found for text in row["assumptions"])
        parts += ["", *(f"- assumed: {text}" for text in about), ""]
    return "\n".join(parts).rstrip() + "\n"


def _line(row: dict[str, Any]) -> str:
    published = _range(row["published"], row["published_low"], row["published_high"])
    ours = _range(row["ours"], row["low"], row["high"])
    verdict = row["verdict"] or f"not testable here: {row['reason']}"
    return ROW.format(
        name=row["name"],
        published=published,
        ours=ours,
        ratio=_short(row["ratio"]),
        verdict=verdict,
        what=row["what"].replace("|", "\\|"),
    )


def _range(value: float | None, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return _short(value)
    return f"{_short(value)} ({_short(low)} to {_short(high)})"


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
