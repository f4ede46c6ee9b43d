"""This module sets up every figure the same way: size, colours, legend, saving."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

from moetier.traces.errors import InputError
from moetier.traces.files import replacing

# Okabe and Ito's palette, which readers with colour blindness can tell apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
MANY = 12  # entries in a legend; with more, the figure grows


def new_figure(width: float = 7.0, height: float = 4.4, columns: int = 1) -> tuple[Any, Any]:
    """Return a figure and its axes; raise `InputError` when matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            "figures need matplotlib, which is not installed",
            way_out="`pip install moetier[plots]`",
        ) from None
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    axes = figure.subplots(1, columns)
    for ax in [axes] if columns == 1 else axes:
        ax.grid(True, color="0.9", lw=0.8)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def palette() -> Iterator[tuple[str, str]]:
    """Yield pairs of colour and marker; a colour comes back with another marker."""
    for at, color in enumerate(cycle(COLORS)):
        yield color, MARKERS[(at + at // len(COLORS)) % len(MARKERS)]


def place_legend(ax: Any, title: str | None) -> None:
    """Put the legend beside the axes, where it covers nothing."""
    handles, labels = ax.get_legend_handles_labels()
    if not labels:
        return
    legend = ax.legend(
        handles, labels, title=title, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False,
        fontsize="small" if len(labels) < MANY else "x-small",
    )  # fmt: skip
    legend._legend_box.align = "left"


def save(figure: Any, path: Path) -> None:
    """Write *figure* as PNG to *path* and as PDF beside it, each whole or not at all.

    Equal figures give equal bytes.
    """
    from matplotlib import rc_context

    kinds = {path: ("png", {"Software": None}), path.with_suffix(".pdf"): ("pdf", _UNDATED)}
    for file, (kind, metadata) in kinds.items():
        drawn = io.BytesIO()  # matplotlib would hide why a file cannot be written
        with rc_context({"pdf.fonttype": 42}):  # text that can be searched
            figure.savefig(drawn, format=kind, metadata=metadata)
        with replacing(file) as temporary:
            temporary.write_bytes(drawn.getvalue())


_UNDATED = {"CreationDate": None}
