"""This module checks rows of a trace as they stream by, and names the first one that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from moetier.traces.batch import PHASES
from moetier.traces.columns import PAD, Columns, Ints
from moetier.traces.errors import InputError
from moetier.traces.opening import REDO
from moetier.traces.schema import Header


class RowCheck:
    """Checks rows as they stream by; *full* adds the checks that cost more than reading.

    Always: ids and layers in range, order, phase, finite weights. Full: also duplicate experts,
    duplicate rows, zero-padded rows, layers that a step leaves out.
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
        if rows.weights is not None and (rows.weights < 0).any():
            row = int(np.argmax((rows.weights < 0).any(axis=1)))
            raise self._fail(row, "weights", f"{rows.weights[row].min()} is negative")
        if self.full:
            self._gaps(rows)
            self._zeros(rows)
            self._repeated_experts(rows)
            self._repeated_rows(rows)
        self.rows += len(rows)
        if len(rows):
            self._last = (int(rows.step[-1]), int(rows.moe_layer[-1]), int(rows.phase[-1]))
        return rows

    def finish(self) -> None:
        """Raise `InputError` if the rows end in the middle of a step; call it after the last."""
        last = self.header.geometry.n_moe_layers - 1
        if self.full and self._last is not None and self._last[1] != last:
            raise self._fail(
                -1, "moe_layer", f"step {self._last[0]} ends at MoE layer {self._last[1]} of {last}"
            )

    def check_arrow(self, batch: pa.RecordBatch) -> None:
        """Check what is lost in arrays: nulls, and the model layer of each MoE layer."""
        for name in batch.schema.names:
            column = batch.column(name)
            if column.null_count and not pa.types.is_nested(column.type):
                row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
                raise self._fail(row, name, "is null")
            if pa.types.is_nested(column.type) and pa.types.is_floating(column.type.value_type):
                self._no_nan(name, column)
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

    def _no_nan(self, name: str, column: pa.Array) -> None:
        """Refuse NaN in a row that is there: what is not known is null."""
        width = column.type.list_size
        values = column.values.slice(column.offset * width, len(column) * width)
        nan = np.isnan(values.to_numpy(zero_copy_only=False)).reshape(-1, width).any(axis=1)
        wrong = nan & ~column.is_null().to_numpy(zero_copy_only=False)
        if wrong.any():
            raise self._fail(
                int(np.argmax(wrong)), name, "NaN", "store null where a value is not known"
            )

    def _fail(self, row: int, column: str, problem: str, way_out: str = REDO) -> InputError:
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

    def _gaps(self, rows: Columns) -> None:
        """Refuse a step that leaves out a MoE layer."""
        last = self.header.geometry.n_moe_layers - 1
        before = (-1, last, 0) if self._last is None else self._last
        step = np.concatenate([[before[0]], rows.step])
        layer = np.concatenate([[before[1]], rows.moe_layer]).astype(np.int64)
        ahead = np.diff(layer)
        wrong = np.where(np.diff(step) == 0, ahead > 1, (layer[:-1] != last) | (layer[1:] != 0))
        if wrong.any():
            row = int(np.argmax(wrong))
            raise self._fail(
                row,
                "moe_layer",
                f"step {step[row + 1]}, MoE layer {layer[row + 1]} comes right after "
                f"step {step[row]}, MoE layer {layer[row]}: a layer is missing",
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
