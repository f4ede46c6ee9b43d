"""This module writes what came of a check: as JSON, and as a page to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moetier.experiments.store import dump_json, write_text

DRY = "DRY RUN on a fake device: no figure here says anything about a GPU."


def write_report(out: Path, report: dict[str, Any]) -> None:
    """Write *report* to the folder *out* as report.json and report.md."""
    write_text(out / "report.json", dump_json(report) + "\n")
    write_text(out / "report.md", as_page(report))


def as_page(report: dict[str, Any]) -> str:
    """Return *report* in Markdown."""
    lines = ["# GPU check", ""]
    if report["dry_run"]:
        lines += [f"**{DRY}**", ""]
    lines += [f"Begun {report['began']} on {report['device']}.", ""]
    lines += ["| step | status | seconds | of | result |", "|---|---|---|---|---|"]
    for step in report["steps"]:
        said = step["error"] or _said(step["result"])
        lines.append(
            f"| {step['name']} | {step['status']} | {step['seconds']:.0f} | {step['budget_s']} | "
            f"{said} |"
        )
    rows = [row for step in report["steps"] for row in (step["result"] or {}).get("rows", [])]
    if rows:
        lines += ["", "Energy of whole runs, mJ:", ""]
        lines += ["| policy | capacity | simulated | measured | error |", "|---|---|---|---|---|"]
        lines += [
            f"| {row['policy']} | {row['capacity']} | {row['simulated_mj']:.0f} | "
            f"{_or_unknown(row['measured_mj'], '.0f')} | {_or_unknown(row['error'], '+.1%')} |"
            for row in rows
        ]
    return "\n".join([*lines, ""])


def _said(result: dict[str, Any] | None) -> str:
    shown = {name: value for name, value in (result or {}).items() if name != "rows"}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def _or_unknown(value: float | None, how: str) -> str:
    return "unknown" if value is None else format(value, how)
