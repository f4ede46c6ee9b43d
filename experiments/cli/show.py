"""This module prints results for people, with rich."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moetier.experiments.config import policy_label
from moetier.experiments.quantities import Quantity, quantity
from moetier.sim.policy.seams import DEFAULTS
from moetier.sim.units import format_bytes

if TYPE_CHECKING:
    from moetier.experiments.sweep import Outcome

MAIN = (
    "tpot_ms", "tpot_p95_ms", "ttft_ms", "tokens_per_s",
    "hit_rate_decode", "miss_rate", "byte_miss_rate", "compulsory_miss_rate", "late_hit_rate",
    "bytes_per_token", "stall_share", "copy_share", "prefetch_precision", "prefetch_coverage",
    "ready_recall", "skipped_share", "cpu_share",
    "energy_mj_per_token", "peak_bytes", "accuracy",
)  # fmt: skip


ASIDE = ("skipped_share", "cpu_share")
"""Shown only where there is something to show."""


def show_run(result: dict[str, Any], console: Console | None = None) -> None:
    """Print the main metrics of one run, what they are shares of, warnings and assumptions."""
    console = console or Console()
    config = result["config"]
    source = config.get("trace") or config.get("live") or _made_up(config)
    console.print(
        f"[bold]{escape(source)}[/] on [bold]{escape(config['hardware'])}[/], "
        f"{config['weights']}, {result['tokens']} tokens"
    )
    told = {seam: part for seam, part in config["policy"].items() if part != DEFAULTS[seam]}
    lossless = "lossless" if result["lossless"] else "lossy: it alters the model's output"
    console.print(f"policy: {escape(policy_label(told))} ({lossless})")
    total = result["expert_bytes_total"]
    for tier, size in result["capacity_bytes"].items():
        console.print(f"{tier}: {format_bytes(size)} for experts, {size / total:.1%} of all")
    table = Table(box=None, pad_edge=False)
    table.add_column("metric")
    table.add_column("value", justify="right")
    table.add_column("of", style="dim")
    for name in MAIN:
        value = result.get(name)
        if value is not None and (value or name not in ASIDE):
            about = quantity(name)
            table.add_row(about.label, _show(value, about), about.per)
    console.print(table)
    for warning in result["warnings"]:
        console.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True)
    for limitation in result["known_limitations"]:
        console.print(f"[dim]assumed: {escape(limitation)}[/]", soft_wrap=True)


def _made_up(config: dict[str, Any]) -> str:
    return f"synthetic {config['synthetic']['geometry']}"


def _show(value: float, about: Quantity) -> str:
    if about.unit == "share":
        return f"{value:.2%}"
    number = value / about.scale
    return f"{number:.4g} {about.unit}" if abs(number) < 1e4 else f"{number:,.0f} {about.unit}"


def show_sweep(outcome: Outcome, console: Console | None = None) -> None:
    """Print where a sweep's results are, what failed and what looks wrong."""
    console = console or Console()
    rows = outcome.rows
    before = f", {outcome.resumed} of them from before" if outcome.resumed else ""
    done = sum(row["status"] == "done" for row in rows)
    console.print(f"{done} of {len(rows)} points done{before}: {outcome.folder}", soft_wrap=True)
    for text in outcome.failed:
        console.print(f"[red]failed:[/] {escape(text)}", soft_wrap=True)
    for warning in outcome.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True)


def show_mapping(values: dict[str, Any], console: Console | None = None) -> None:
    """Print *values* as a table of names and values; what is null is not known."""
    console = console or Console()
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in values.items():
        if name != "warnings":
            table.add_row(name.replace("_", " "), escape(_cell(name, value)))
    console.print(table)
    for warning in values.get("warnings", []):
        console.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True)


def show_table(
    rows: list[dict[str, Any]], columns: list[str], console: Console | None = None
) -> None:
    """Print *columns* of *rows*."""
    console = console or Console()
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(escape(_cell(name, row.get(name))) for name in columns))
    console.print(table)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float) and "bytes" in name:
        return format_bytes(round(value))
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:,.0f}"
    if isinstance(value, int) and "bytes" in name:
        return f"{format_bytes(value)} ({value} bytes)"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(key, item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(_cell(name, item) for item in value) or "none"
    return str(value)
