"""This module holds rows of a trace as numpy arrays, and moves them to and from Arrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from moetier.traces.batch import Floats
from moetier.traces.schema import Header, arrow_schema

Ints = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]

PAD = -1
"""The id of an expert slot that holds nothing."""


@dataclass(slots=True)
class Columns:
    """Rows of a trace, one per token and MoE layer; k is top-k and E the number of experts.

    A row of `weights`, `scores` or `predicted` that is not known holds NaN; in a file it is null.
    """

    request: Ints  # (n,) int32
    phase: Ints  # (n,) int8
    step: Ints  # (n,) int32
    position: Ints  # (n,) int32
    moe_layer: Ints  # (n,) int16
    experts: Ints  # (n, k) int16, PAD where a slot is empty
    valid: Bools  # (n,)
    weights: Floats | None = None  # (n, k)
    scores: Floats | None = None  # (n, E)
    predicted: dict[int, Floats] = field(default_factory=dict)  # horizon -> (n, E)
    recorded: Ints | None = None  # (n, k) int8

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.step)

    def take(self, rows: slice | Ints | Bools) -> Columns:
        """Return the chosen *rows*, in the order given."""
        return Columns(
            **{name: getattr(self, name)[rows] for name in _PLAIN},
            weights=None if self.weights is None else self.weights[rows],
            scores=None if self.scores is None else self.scores[rows],
            predicted={horizon: item[rows] for horizon, item in self.predicted.items()},
            recorded=None if self.recorded is None else self.recorded[rows],
        )

    def to_arrow(self, header: Header) -> pa.RecordBatch:
        """Return the rows as Arrow columns of the schema of *header*."""
        schema = arrow_schema(header)
        layers = np.asarray(header.geometry.moe_layers, np.int16)[self.moe_layer]
        wide = {"weights": self.weights, "scores": self.scores, "recorded": self.recorded}
        wide |= {f"predicted_{horizon}": item for horizon, item in self.predicted.items()}
        columns: list[pa.Array] = []
        for item in schema:
            if item.name == "layer":
                columns.append(pa.array(layers))
            elif item.name == "experts":
                columns.append(_lists(self.experts, item.type, len(self)))
            elif pa.types.is_fixed_size_list(item.type):
                columns.append(_lists(wide.get(item.name), item.type, len(self)))
            else:
                columns.append(pa.array(getattr(self, item.name), item.type))
        return pa.RecordBatch.from_arrays(columns, schema=schema)


_PLAIN = ("request", "phase", "step", "position", "moe_layer", "experts", "valid")


class ColumnSource(Protocol):
    """A source whose rows can also be had as arrays."""

    @property
    def header(self) -> Header:
        """The header: geometry, bytes and provenance."""
        ...

    def columns(self) -> Iterator[Columns]:
        """Yield the rows in chunks, in forward order. Can be called again."""
        ...


def build(
    header: Header,
    *,
    request: Any,
    phase: Any,
    step: Any,
    position: Any,
    moe_layer: Any,
    experts: Any,
    weights: Any = None,
    valid: Any = True,
    scores: Any = None,
    predicted: dict[int, Any] | None = None,
    recorded: Any = None,
) -> Columns:
    """Return rows from array-likes; a scalar stands for every row.

    *experts* is (n, k) and settles n. *weights*, *scores* and *recorded* may be None: not known.

    Raises:
        ValueError: If a shape does not fit, or the header has no column for what is given.
    """
    k, n_experts = header.geometry.top_k, header.geometry.n_experts
    ids = _matrix("experts", experts, k, np.int16)
    n = len(ids)
    if scores is not None and header.score_kind == "none":
        raise ValueError("scores given, but the header's score_kind is 'none'")
    if recorded is not None and not header.recorded_residency:
        raise ValueError("recorded given, but the header's recorded_residency is false")
    horizons = [item.horizon for item in header.predictors]
    for horizon in predicted or {}:
        if horizon not in horizons:
            raise ValueError(f"predicted[{horizon}] given, but the header's are {horizons}")

    def plain(name: str, value: Any, dtype: Any) -> Any:
        array = _cast(name, value, dtype)
        if array.ndim and array.shape != (n,):
            raise ValueError(f"{name} has shape {array.shape}, expected ({n},)")
        return np.broadcast_to(array, (n,))

    def wide(name: str, value: Any, width: int, dtype: Any) -> Any:
        array = None if value is None else _matrix(name, value, width, dtype)
        if array is not None and len(array) != n:
            raise ValueError(f"{name} has {len(array)} rows, expected {n}")
        return array

    return Columns(
        plain("request", request, np.int32),
        plain("phase", phase, np.int8),
        plain("step", step, np.int32),
        plain("position", position, np.int32),
        plain("moe_layer", moe_layer, np.int16),
        ids,
        plain("valid", valid, np.bool_),
        wide("weights", weights, k, np.float32),
        wide("scores", scores, n_experts, np.float32),
        {
            horizon: wide(f"predicted[{horizon}]", item, n_experts, np.float32)
            for horizon, item in (predicted or {}).items()
        },
        wide("recorded", recorded, k, np.int8),
    )


def concat(chunks: Sequence[Columns]) -> Columns:
    """Return the rows of all *chunks*; what one of them lacks is not known in its rows."""
    if len(chunks) == 1:
        return chunks[0]
    horizons = sorted({horizon for chunk in chunks for horizon in chunk.predicted})
    return Columns(
        **{name: np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in _PLAIN},
        weights=_join([chunk.weights for chunk in chunks], chunks, np.nan),
        scores=_join([chunk.scores for chunk in chunks], chunks, np.nan),
        predicted={
            horizon: joined
            for horizon in horizons
            if (joined := _join([c.predicted.get(horizon) for c in chunks], chunks, np.nan))
            is not None
        },
        recorded=_join([chunk.recorded for chunk in chunks], chunks, PAD),
    )


def from_arrow(batch: pa.RecordBatch) -> Columns:
    """Return the rows of an Arrow *batch*; columns that it lacks are None."""
    names = set(batch.schema.names)
    horizons = sorted(
        int(name.removeprefix("predicted_")) for name in names if name.startswith("predicted_")
    )
    predicted = {
        horizon: item
        for horizon in horizons
        if (item := _floats(batch, f"predicted_{horizon}", names)) is not None
    }
    return Columns(
        **{name: (_values if name == "experts" else _plain)(batch.column(name)) for name in _PLAIN},
        weights=_floats(batch, "weights", names),
        scores=_floats(batch, "scores", names),
        predicted=predicted,
        recorded=_values(batch.column("recorded")) if "recorded" in names else None,
    )


def _cast(name: str, value: Any, dtype: Any) -> Any:
    array = np.asarray(value)
    if array.size and array.dtype.kind in "iu" and np.dtype(dtype).kind == "i":
        limits = np.iinfo(dtype)
        low, high = int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:  # a cast would wrap it round silently
            raise ValueError(f"{name} has {low} to {high}, allowed {limits.min} to {limits.max}")
    return array.astype(dtype, copy=False)


def _matrix(name: str, value: Any, width: int, dtype: Any) -> Any:
    array = _cast(name, value, dtype)
    if array.ndim != 2 or array.shape[1] != width:
        raise ValueError(f"{name} has shape {array.shape}, expected (rows, {width})")
    return array


def _join(parts: Sequence[Any], chunks: Sequence[Columns], fill: float) -> Any:
    known = next((part for part in parts if part is not None), None)
    if known is None:
        return None
    return np.concatenate(
        [
            np.full((len(chunk), known.shape[1]), fill, known.dtype) if part is None else part
            for part, chunk in zip(parts, chunks, strict=True)
        ]
    )


def _lists(array: Any, kind: pa.DataType, n: int) -> pa.Array:
    if array is None:
        return pa.nulls(n, kind)
    values = pa.array(np.ascontiguousarray(array).reshape(-1), kind.value_type)
    mask = None
    if array.dtype.kind == "f":
        unknown = np.isnan(array).all(axis=1)
        mask = pa.array(unknown) if unknown.any() else None
    return pa.FixedSizeListArray.from_arrays(values, type=kind, mask=mask)


def _plain(column: pa.Array) -> Any:
    return column.to_numpy(zero_copy_only=False)


def _values(column: pa.Array) -> Any:
    width = column.type.list_size
    start = column.offset * width
    values = column.values.slice(start, len(column) * width)
    if values.null_count and not pa.types.is_floating(values.type):
        values = values.fill_null(PAD)
    return values.to_numpy(zero_copy_only=False).reshape(len(column), width)


def _floats(batch: pa.RecordBatch, name: str, names: set[str]) -> Any:
    if name not in names:
        return None
    column = batch.column(name)
    if column.null_count == len(column):
        return None
    array = _values(column)
    if column.null_count:
        array = np.where(column.is_null().to_numpy(zero_copy_only=False)[:, None], np.nan, array)
        array = array.astype(np.float32)
    return array
