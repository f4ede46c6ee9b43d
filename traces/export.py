"""This module writes a trace's rows as CSV or JSON lines, for other programs."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from moetier.traces.batch import PHASES
from moetier.traces.columns import PAD, ColumnSource
from moetier.traces.errors import InputError
from moetier.traces.files import replacing

ExportFormat = Literal["csv", "jsonl"]
EXPORT_FORMATS: tuple[str, ...] = get_args(ExportFormat)

CSV_COLUMNS = (
    "request", "phase", "step", "position", "layer", "moe_layer", "slot", "expert", "weight",
    "recorded",
)  # fmt: skip


def export(source: ColumnSource, out: str | Path, kind: str | None = None) -> int:
    """Write the rows of *source* to *out* and return how many lines have data.

    *kind* is `csv` (a line per expert slot in use) or `jsonl` (the header, then a line per token
    and layer); default: the ending of *out*. Not known is empty in CSV and null in JSON. Rows with
    `valid` false are left out.

    Raises:
        InputError: If *kind* is not known, or *out* cannot be written.
    """
    kind = Path(out).suffix.removeprefix(".") if kind is None else kind
    if kind not in EXPORT_FORMATS:
        raise InputError(
            f"unknown export format '{kind}'",
            where=out,
            way_out=f"known: {', '.join(EXPORT_FORMATS)}, and on the command line oracle-general",
        )
    n_lines = 0
    with replacing(out) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        if kind == "csv":
            table = csv.writer(file, lineterminator="\n")
            table.writerow(CSV_COLUMNS)
            for row in _rows(source):
                lines = _slots(row)
                table.writerows(lines)
                n_lines += len(lines)
        else:
            file.write(json.dumps({"header": source.header.model_dump(mode="json")}) + "\n")
            for row in _rows(source):
                file.write(json.dumps(row) + "\n")
                n_lines += 1
    return n_lines


def _rows(source: ColumnSource) -> Iterator[dict[str, Any]]:
    layers = source.header.geometry.moe_layers
    for chunk in source.columns():
        rows = chunk.take(chunk.valid)
        n = len(rows)
        for request, phase, step, position, moe_layer, experts, weights, recorded in zip(
            rows.request.tolist(),
            rows.phase.tolist(),
            rows.step.tolist(),
            rows.position.tolist(),
            rows.moe_layer.tolist(),
            rows.experts.tolist(),
            _lists(rows.weights, n),
            [None] * n if rows.recorded is None else rows.recorded.tolist(),
            strict=True,
        ):
            used = [slot for slot, expert in enumerate(experts) if expert != PAD]
            yield {
                "request": request,
                "phase": PHASES[phase],
                "step": step,
                "position": position,
                "layer": layers[moe_layer],
                "moe_layer": moe_layer,
                "slots": used,
                "experts": [experts[slot] for slot in used],
                "weights": None if weights is None else [weights[slot] for slot in used],
                "recorded": None if recorded is None else [recorded[slot] for slot in used],
            }


def _lists(array: Any, n: int) -> list[list[float] | None]:
    """Return the rows of *array*, None for one that is not known.

    A weight is spelt with the digits of float32, and reads back to the same float32.
    """
    if array is None:
        return [None] * n
    known = ~np.isnan(array).any(axis=1)
    return [
        [float(str(value)) for value in row] if there else None
        for row, there in zip(array, known.tolist(), strict=True)
    ]


def _slots(row: dict[str, Any]) -> list[list[Any]]:
    shared = [row[name] for name in CSV_COLUMNS[:6]]
    used = range(len(row["slots"]))
    weights, recorded = (
        ["" for _ in used] if row[name] is None else row[name] for name in ("weights", "recorded")
    )
    return [[*shared, row["slots"][i], row["experts"][i], weights[i], recorded[i]] for i in used]
