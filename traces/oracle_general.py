"""This module writes a trace for libCacheSim, in its binary format oracleGeneral.

A record has 24 bytes, little-endian and packed: u32 time, u64 object, u32 bytes, i64 the number of
the object's next request, counted from 1, or -1 (libCacheSim's FAQ and `traceConv`). A request is
an expert needed by one batch: once, however many of its tokens chose it, in the
order in which they first did.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from moetier.traces.columns import PAD, ColumnSource, Ints
from moetier.traces.errors import InputError
from moetier.traces.files import replacing
from moetier.traces.formats import stored_expert_bytes

RECORD = np.dtype([("time", "<u4"), ("obj", "<u8"), ("size", "<u4"), ("next", "<i8")])
NEXT_AT = 16  # bytes into a record


def export_oracle_general(source: ColumnSource, out: str | Path, weights: str | None = None) -> int:
    """Write the requests of *source* to *out* and return how many there are.

    Time is the forward step; the object is `moe_layer * n_experts + expert`; its size is that of
    the expert in the format *weights*, default what the trace records, else bf16. Memory is that
    of one chunk of rows: the next request of an object is filled in when it comes.

    Raises:
        InputError: If an expert's bytes are not known or above 4 GiB, or *out* cannot be written.
    """
    header = source.header
    _, nbytes = stored_expert_bytes(header, weights)
    if max(nbytes) >= 1 << 32:
        raise InputError(
            f"an expert has {max(nbytes)} bytes",
            where=out,
            way_out="the format holds up to 4294967295; name a smaller one with --weights",
        )
    n_experts = header.geometry.n_experts
    sizes = np.asarray(nbytes, np.uint32)
    last: Ints = np.full(n_experts * len(nbytes), -1, np.int64)  # of each object, from 0
    n, seen = 0, np.empty((0, 3), np.int64)
    with replacing(out) as temporary, temporary.open("w+b") as file:
        for chunk in source.columns():
            keys = _requests(chunk)
            if len(seen):  # a batch may go on in the next chunk
                keys = _once(np.concatenate([seen, keys]))
            same = (keys[:, :2] == keys[-1:, :2]).all(axis=1)
            seen = keys[same]
            n = _write(file, keys[~same], n, n_experts, sizes, last)
        n = _write(file, seen, n, n_experts, sizes, last)
        if not n:
            raise InputError("no requests to write", where=out, way_out="nothing was routed")
    return n


def _requests(chunk: Any) -> Ints:
    """Return step, layer and expert of each request of a chunk, in order."""
    rows = chunk.take(chunk.valid)
    row, slot = np.nonzero(rows.experts != PAD)
    columns = (rows.step[row], rows.moe_layer[row], rows.experts[row, slot])
    return _once(np.stack(columns, axis=1).astype(np.int64))


def _once(keys: Ints) -> Ints:
    """Return *keys* without repeats, in the order of their first appearance."""
    first = np.unique(keys, axis=0, return_index=True)[1]
    kept: Ints = keys[np.sort(first)].reshape(-1, 3)
    return kept


def _write(file: Any, keys: Ints, n: int, n_experts: int, sizes: Any, last: Ints) -> int:
    """Append the requests *keys*, tell those before of them, and return the new total."""
    if not len(keys):
        return n
    step, layer, expert = keys.T
    records = np.empty(len(keys), RECORD)
    records["time"], records["size"], records["next"] = step, sizes[layer], -1
    objects = layer * n_experts + expert
    records["obj"] = objects
    order = np.argsort(objects, kind="stable")
    again = objects[order][1:] == objects[order][:-1]
    records["next"][order[:-1][again]] = n + order[1:][again] + 1
    first = order[np.concatenate([[True], ~again])]
    for at in first[last[objects[first]] >= 0].tolist():
        file.seek(int(last[objects[at]]) * RECORD.itemsize + NEXT_AT)
        file.write(np.int64(n + at + 1).astype("<i8").tobytes())
    final = order[np.concatenate([~again, [True]])]
    last[objects[final]] = n + final
    file.seek(n * RECORD.itemsize)
    file.write(records.tobytes())
    return n + len(keys)
