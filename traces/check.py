"""This module checks that a trace file can be trusted, and says what is wrong where it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from moetier.traces.batch import PHASES
from moetier.traces.columns import PAD, Columns, Ints
from moetier.traces.errors import InputError
from moetier.traces.schema import HEADER_KEY, VERSION, Header, arrow_schema

MAGIC = b"PAR1"
_REDO = "capture or convert the trace again"


def open_trace(path: str | Path) -> tuple[Header, int]:
    """Return the header of the trace at *path* and its number of rows, reading the footer only.

    Raises:
        InputError: If the file is missing, truncated, empty, not Parquet, without a header, of
            another version, or its columns are not those of its header.
    """
    path = Path(path)
    footer = _footer(path)
    header = _header(path, footer.schema.to_arrow_schema())
    if footer.num_rows == 0:
        raise InputError("the trace has no rows", where=path, way_out=_REDO)
    return header, footer.num_rows


def _footer(path: Path) -> Any:
    if not path.is_file():
        problem = "is a directory" if path.is_dir() else "no such file"
        raise InputError(problem, where=path, way_out="name a trace (.parquet)")
    with path.open("rb") as file:
        start = file.read(4)
        size = file.seek(0, 2)
        file.seek(max(size - 4, 0))
        end = file.read(4)
    if size == 0:
        raise InputError("the file is empty (0 bytes)", where=path, way_out=_REDO)
    if start != MAGIC:
        raise InputError(
            f"not a Parquet file (it starts with {start!r})",
            where=path,
            way_out="`moetier trace convert` reads other formats",
        )
    if end != MAGIC:
        raise InputError(f"truncated after {size} bytes: no footer", where=path, way_out=_REDO)
    try:
        return pq.ParquetFile(path).metadata
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"damaged Parquet footer ({error})", where=path, way_out=_REDO) from None


def _header(path: Path, schema: pa.Schema) -> Header:
    text = (schema.metadata or {}).get(HEADER_KEY)
    if text is None:
        raise InputError(
            "Parquet, but not a trace: its metadata has no 'moetier' header",
            where=path,
            way_out="`moetier trace convert` reads other formats",
        )
    try:
        header = Header.model_validate_json(text)
    except ValidationError as error:
        version = _version(text)
        if version not in (None, VERSION):
            raise _wrong_version(path, version) from None
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"header, key '{key}': {first['msg']}, got {first['input']!r}",
            where=path,
            way_out=_REDO,
        ) from None
    if header.version != VERSION:
        raise _wrong_version(path, header.version)
    _check_columns_exist(path, schema, arrow_schema(header))
    _check_header_lists(path, header)
    return header


def _version(text: bytes) -> object:
    try:
        return json.loads(text).get("version")
    except (ValueError, AttributeError):
        return None


def _wrong_version(path: Path, version: object) -> InputError:
    return InputError(
        f"trace version {version}, this moetier reads version {VERSION}",
        where=path,
        way_out="capture or convert the trace again, or install the moetier that wrote it",
    )


def _check_columns_exist(path: Path, schema: pa.Schema, expected: pa.Schema) -> None:
    for item in expected:
        if item.name not in schema.names:
            raise InputError(f"column '{item.name}' is missing", where=path, way_out=_REDO)
        found = schema.field(item.name).type
        if found != item.type:
            raise InputError(
                f"column '{item.name}' is {found}, expected {item.type}",
                where=path,
                way_out=_REDO,
            )


def _check_header_lists(path: Path, header: Header) -> None:
    n = header.geometry.n_moe_layers
    per_layer: dict[str, Any] = {f"expert_bytes.{k}": v for k, v in header.expert_bytes.items()}
    per_layer |= {f"slice_bytes.{k}": v for k, v in header.slice_bytes.items()}
    if header.dense_bytes is not None:
        per_layer["dense_bytes"] = header.dense_bytes
    for key, items in per_layer.items():
        if len(items) != n:
            raise InputError(
                f"header, key '{key}' has {len(items)} layers, the geometry {n}",
                where=path,
                way_out=_REDO,
            )


class RowCheck:
    """Checks rows as they stream by; *full* adds the checks that cost more than reading.

    Always: ids and layers in range, order, phase, finite weights. Full: also duplicate experts,
    duplicate rows, zero-padded rows, the model-layer column.
    """

    def __init__(self, header: Header, where: str | Path, *, full: bool = False) -> None:
        """Check rows of a trace with *header*; *where* names it in messages."""
        self.header, self.where, self.full = header, where, full
        self.rows = 0
        self._last: tuple[int, int, int] | None = None  # step, MoE layer, phase
        self._seen: Ints = np.empty((0, 2), np.int64)  # (request, position) in the open batch

    def check(self, rows: Columns) -> Columns:
        """Return *rows* unchanged; raise `InputError` at the first row that is wrong."""
        geometry = self.header.geometry
        _in = self._in_range
        _in("request", rows.request, 0, None)
        _in("position", rows.position, 0, None)
        _in("step", rows.step, 0, None)
        _in("phase", rows.phase, 0, len(PHASES) - 1)
        _in("moe_layer", rows.moe_layer, 0, geometry.n_moe_layers - 1)
        _in("experts", rows.experts, PAD, geometry.n_experts - 1)
        for name, values in (("weights", rows.weights), ("scores", rows.scores)):
            if values is not None:
                self._finite(name, values)
        for horizon, values in rows.predicted.items():
            self._finite(f"predicted_{horizon}", values)
        if rows.recorded is not None:
            _in("recorded", rows.recorded, PAD, 2)
        self._order(rows)
        if self.full:
            self._zeros(rows)
            self._repeated_experts(rows)
            self._repeated_rows(rows)
        self.rows += len(rows)
        if len(rows):
            self._last = (int(rows.step[-1]), int(rows.moe_layer[-1]), int(rows.phase[-1]))
        return rows

    def check_arrow(self, batch: pa.RecordBatch) -> None:
        """Check what is lost in arrays: nulls, and the model layer of each MoE layer."""
        for name in batch.schema.names:
            column = batch.column(name)
            if column.null_count and not pa.types.is_nested(column.type):
                row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
                raise self._fail(row, name, "is null")
        if "layer" not in batch.schema.names:
            return
        moe_layer = batch.column("moe_layer").to_numpy()
        layer = batch.column("layer").to_numpy()
        layers = np.asarray(self.header.geometry.moe_layers)
        wrong = layers[np.clip(moe_layer, 0, len(layers) - 1)] != layer
        if wrong.any():
            row = int(np.argmax(wrong))
            raise self._fail(
                row, "layer", f"model layer {layer[row]} is not MoE layer {moe_layer[row]}"
            )

    def _fail(self, row: int, column: str, problem: str, way_out: str = _REDO) -> InputError:
        return InputError(
            f"row {self.rows + row}, column '{column}': {problem}",
            where=self.where,
            way_out=way_out,
        )

    def _in_range(self, column: str, values: Ints, low: int, high: int | None) -> None:
        if not values.size:
            return
        if values.min() >= low and (high is None or values.max() <= high):
            return
        wrong = (values < low) | (False if high is None else values > high)
        row = int(np.argmax(wrong.any(axis=1) if wrong.ndim == 2 else wrong))
        value = int(values[row][wrong[row]][0] if wrong.ndim == 2 else values[row])
        limit = f"at least {low}" if high is None else f"{low} to {high}"
        raise self._fail(row, column, f"{value} is out of range, expected {limit}")

    def _finite(self, column: str, values: Any) -> None:
        """Accept rows that are all NaN (not known), no other value that is not finite."""
        finite = np.isfinite(values)
        if finite.all():
            return
        wrong = ~finite.all(axis=1) & ~np.isnan(values).all(axis=1)
        if wrong.any():
            row = int(np.argmax(wrong))
            value = values[row][~finite[row]][0]
            raise self._fail(
                row, column, f"{value} is not finite", "store null where a value is not known"
            )

    def _order(self, rows: Columns) -> None:
        if not len(rows):
            return
        step, layer, phase = (
            np.concatenate([[] if self._last is None else [self._last[i]], column]).astype(np.int64)
            for i, column in enumerate((rows.step, rows.moe_layer, rows.phase))
        )
        skip = 0 if self._last is None else 1
        key = step * self.header.geometry.n_moe_layers + layer
        jump = np.diff(key)
        if (jump < 0).any():
            row = int(np.argmax(jump < 0)) + 1
            raise self._fail(
                row - skip,
                "step",
                f"step {step[row]}, MoE layer {layer[row]} comes after "
                f"step {step[row - 1]}, MoE layer {layer[row - 1]}",
                "sort the rows by step, then by moe_layer",
            )
        mixed = (jump == 0) & (np.diff(phase) != 0)
        if mixed.any():
            row = int(np.argmax(mixed)) + 1
            raise self._fail(
                row - skip,
                "phase",
                f"step {step[row]} mixes prefill and decode",
                "give prefill and decode steps of their own",
            )

    def _zeros(self, rows: Columns) -> None:
        if self.header.geometry.top_k == 1:
            return  # expert 0 alone is a choice like any other
        wrong = (rows.experts == 0).all(axis=1) & rows.valid
        if wrong.any():
            raise self._fail(
                int(np.argmax(wrong)),
                "experts",
                f"all {self.header.geometry.top_k} ids are 0, which is padding and not routing",
                "mark padded rows with valid=false or ids with -1",
            )

    def _repeated_experts(self, rows: Columns) -> None:
        ids = np.sort(rows.experts, axis=1)
        wrong = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] != PAD)
        wrong &= rows.valid[:, None]
        if wrong.any():
            row = int(np.argmax(wrong.any(axis=1)))
            value = ids[row, 1:][wrong[row]][0]
            raise self._fail(row, "experts", f"expert {value} appears twice in one token")

    def _repeated_rows(self, rows: Columns) -> None:
        valid = np.flatnonzero(rows.valid)
        if not len(valid):
            return
        keys = np.stack([rows.step, rows.moe_layer, rows.request, rows.position], axis=1)
        keys = keys[valid].astype(np.int64)
        held = self._seen if self._seen.size and (self._seen[0, :2] == keys[0, :2]).all() else None
        both = keys if held is None else np.concatenate([held, keys])
        order = np.lexsort(both.T[::-1])
        twice = (both[order][1:] == both[order][:-1]).all(axis=1)
        if twice.any():
            at = int(order[1:][twice].min())
            step, layer, request, position = both[at].tolist()
            row = int(valid[at - (len(both) - len(keys))])
            raise self._fail(
                row,
                "position",
                f"request {request}, step {step}, position {position}, MoE layer {layer} "
                "appears twice",
            )
        last = (both[:, :2] == both[-1, :2]).all(axis=1)
        self._seen = both[last]
