"""This module reads the FLAME-MoE routing traces: a folder `iter_N` of one Parquet file per layer.

Row i of every `layer_NN.parquet` is token i of the pretraining data: `indices` and `scores`, the
softmax of the chosen experts, which are not said to be the weights the model used. Files count
layers from 1. There is no decode and no end of a text in them: tokens are cut into sequences.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moetier.traces.batch import DECODE, PREFILL
from moetier.traces.errors import InputError
from moetier.traces.importers import register
from moetier.traces.importers._names import fit_geometry
from moetier.traces.importers._routed import checked_ids, rows_of
from moetier.traces.io import TraceWriter
from moetier.traces.registry import Positive
from moetier.traces.schema import Header, Provenance

SEQUENCE = 2048
"""Tokens of a sequence where nothing else is said; the files do not say it."""

_DAMAGED = (pa.ArrowException, OSError, UnicodeDecodeError)
_NAME = re.compile(r"layer_(\d+)\.parquet$")


@register("flame")
def import_flame(
    source: Path,
    out: Path,
    model: str | None = None,
    n_experts: Positive = 64,
    sequence: Positive | None = None,
    tokens: Positive | None = None,
    phase: Literal["prefill", "decode"] = "prefill",
) -> Header:
    """Import a folder of FLAME-MoE traces, or one layer file of it together with its siblings.

    Every *sequence* tokens are a request. Training read them in one pass, a *phase* of prefill;
    `decode` replays them one by one, which routes alike, as no token sees those after it.
    *tokens* stops early: a capture has 52 million.

    Raises:
        InputError: If layers are missing or differ in length, or an id is wrong.
    """
    source = Path(source)
    if source.exists() and source.is_file() and not _NAME.search(source.name):
        raise InputError(
            "is no layer_NN.parquet", where=source, way_out="name the folder actives/iter_N"
        )
    folder = source if source.is_dir() else source.parent
    files = {int(m[1]) - 1: p for p in sorted(folder.glob("*")) if (m := _NAME.search(p.name))}
    if not source.exists() or not files or min(files) < 0:
        raise InputError(
            "no layer_01.parquet or later", where=source, way_out="name the folder actives/iter_N"
        )
    layers = sorted(files)
    if layers != list(range(layers[0], layers[-1] + 1)):
        gap = next(i for i in range(layers[0], layers[-1]) if i not in files)
        raise InputError(
            f"layer_{gap + 1:02d}.parquet is missing", where=folder, way_out="fetch it too"
        )
    size = sequence or SEQUENCE
    with ExitStack() as stack:
        opened = [_open(files[layer], stack) for layer in layers]
        rows = {file.metadata.num_rows for file in opened}
        if len(rows) > 1:
            raise InputError(
                f"layers have {sorted(rows)} tokens", where=folder, way_out="fetch them again"
            )
        chunks = zip(
            *(_chunks(file, files[i], size) for file, i in zip(opened, layers, strict=True)),
            strict=True,
        )
        top_k = opened[0].schema_arrow.field("indices").type
        first = next(chunks, None)
        if first is None:
            raise InputError("no tokens", where=folder, way_out="fetch them again")
        k = top_k.list_size if pa.types.is_fixed_size_list(top_k) else first[0][0].shape[1]
        geometry, missing = fit_geometry(
            folder.resolve().parent.parent.name or folder.name,
            model,
            n_experts=n_experts,
            top_k=k,
            moe_layers=layers,
            n_layers=None,
            where=str(folder),
        )
        unknown = ["scores", "expert_bytes", "dense_bytes", "ends of texts", "norm_topk"]
        unknown += [] if sequence else ["sequence"]
        header = Header(
            geometry=geometry,
            unknown=unknown + missing,
            provenance=Provenance(
                kind="imported",
                model=model,
                importer="flame",
                note=f"{folder.name}; weights are softmax scores, not renormalised"
                + ("; teacher-forced text replayed as decode" if phase == "decode" else ""),
            ),
        )
        with TraceWriter(out, header) as writer:
            step, left = 0, tokens or max(rows)
            for number, parts in enumerate(_all(first, chunks)):
                n = min(left, len(parts[0][0]))
                if n == 0:
                    break
                ids = np.stack([part[0][:n] for part in parts], axis=1)  # (n, layers, k)
                ids = checked_ids(ids, f"{folder}: tokens from {number * size}")
                weights = np.stack([part[1][:n] for part in parts], axis=1)
                code = PREFILL if phase == "prefill" else DECODE
                added = rows_of(ids, np.ones(n, np.bool_), number, code, step, 0, 0, n)
                flat = weights if code == DECODE else weights.transpose(1, 0, 2)
                writer.add(**added, weights=flat.reshape(-1, k))
                step += 1 if code == PREFILL else n
                left -= n
    return header


def _open(path: Path, stack: ExitStack) -> Any:
    try:
        file = stack.enter_context(pq.ParquetFile(path))
        names = file.schema_arrow.names
    except _DAMAGED as error:
        raise _unreadable(path, error) from None
    for name in ("scores", "indices"):
        if name not in names:
            raise InputError(
                f"no column '{name}' (found: {', '.join(names)})",
                where=path,
                way_out="is it a file of actives/iter_N?",
            )
    return file


def _batches(file: Any, path: Path, size: int) -> Iterator[Any]:
    try:
        yield from file.iter_batches(size, columns=["indices", "scores"])
    except _DAMAGED as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(f"cannot be read as Parquet ({error})", where=path, way_out="fetch it again")


def _chunks(file: Any, path: Path, size: int) -> Iterator[tuple[Any, Any]]:
    """Yield ids and scores (tokens, k) of *size* tokens each, the last of fewer."""
    held: list[tuple[Any, Any]] = []
    n = 0
    for batch in _batches(file, path, size):
        ids, scores = (_matrix(batch.column(c), path, c) for c in ("indices", "scores"))
        if ids.shape != scores.shape:
            raise InputError(
                f"{ids.shape[1]} indices, {scores.shape[1]} scores", where=path, way_out="refetch"
            )
        held.append((ids, scores))
        n += len(ids)
        while n >= size:
            joined = tuple(np.concatenate(column) for column in zip(*held, strict=True))
            yield joined[0][:size], joined[1][:size]
            held, n = [(joined[0][size:], joined[1][size:])], n - size
    if n:
        joined = tuple(np.concatenate(column) for column in zip(*held, strict=True))
        yield joined[0], joined[1]


def _matrix(column: Any, path: Path, name: str) -> Any:
    lengths = np.unique(column.value_lengths().to_numpy(zero_copy_only=False))
    values = column.flatten()
    if len(lengths) != 1 or values.null_count or column.null_count:
        raise InputError(
            f"column '{name}': tokens of {lengths.tolist()} experts, {values.null_count} null",
            where=path,
            way_out="expected the same number for every token",
        )
    array = values.to_numpy(zero_copy_only=False).reshape(len(column), -1)
    return array.astype(np.float32) if name == "scores" else array


def _all(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest
