"""This module reads the forward passes of SGLang's recorder from an .npz, and finds its requests.

The recorder names no requests. A prompt is a run of `extend_seq_lens` tokens, and a decoded token
belongs to the request that is due at its position, the one longest waiting where several are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moetier.traces.batch import DECODE, PREFILL
from moetier.traces.columns import PAD, Ints
from moetier.traces.errors import InputError
from moetier.traces.geometry import load_geometry
from moetier.traces.importers._names import fit_geometry
from moetier.traces.importers._routed import checked_ids, load_arrays, to_logical
from moetier.traces.io import TraceWriter
from moetier.traces.schema import Header, Provenance

RECORDED_SLOTS = 8
"""Slots that the recorder keeps, whatever the model's top-k."""

_MODES = {"1": "extend", "2": "decode", "3": "mixed"}  # of SGLang's ForwardMode
_NEEDED = ("topk_ids_of_layer", "positions", "forward_mode")


@dataclass(slots=True)
class _Pass:
    where: str
    ids: Ints  # (tokens, layers, slots)
    positions: Ints
    mode: str
    lengths: list[int]  # of the runs of prompt tokens


@dataclass
class _Requests:
    """Gives runs of tokens the number of their request."""

    due: dict[int, int] = field(default_factory=dict)  # request -> the position it is due at
    decoding: set[int] = field(default_factory=set)
    n: int = 0

    def place(self, start: int, end: int, *, decode: bool) -> int:
        """Return the request of a run of the positions *start* to *end*, a new one if none is due.

        A further chunk of a prompt cannot belong to a request that decodes already. The request
        goes to the end of the queue.
        """
        waiting = (n for n, at in self.due.items() if at == start)
        found = next((n for n in waiting if decode or n not in self.decoding), None)
        if found is None or start == 0:
            found, self.n = self.n, self.n + 1
        self.due.pop(found, None)
        self.due[found] = end
        if decode:
            self.decoding.add(found)
        return found


def import_passes(
    source: Path,
    out: Path,
    *,
    model: str | None,
    n_experts: int | None,
    rank: int | None,
    top_k: int | None,
) -> Header:
    """Write the trace of the recorder's forward passes; see `import_sglang`."""
    passes = _passes(source, rank)
    counts = max(int((item.ids != PAD).sum(axis=2).max()) for item in passes)
    known = None if model is None else load_geometry(model)
    top_k = top_k or (known.top_k if known else counts)
    if top_k > RECORDED_SLOTS:
        raise InputError(
            f"top-{top_k}, but the recorder keeps {RECORDED_SLOTS} ids of a token",
            where=source,
            way_out="use return_routed_experts for such a model",
        )
    if counts != top_k:
        raise InputError(
            f"tokens have up to {counts} ids, the model top-{top_k}",
            where=source,
            way_out="name the right model; one more is a shared expert fused into the routed "
            "ones, whose ids are wrong: serve with --disable-shared-experts-fusion",
        )
    used = np.any([(item.ids != PAD).any(axis=(0, 2)) for item in passes], axis=0)
    index = np.flatnonzero(used)
    largest = max(int(item.ids.max()) for item in passes)
    unknown = [
        "weights", "scores", "slot order", "requests", "expert_bytes", "dense_bytes",
    ]  # fmt: skip
    unknown += ["model"] if model is None else []
    unknown += ["n_experts"] if model is None and n_experts is None else []
    unknown += ["top_k"] if model is None and top_k == RECORDED_SLOTS else []
    n_experts = n_experts or (known.n_experts if known else largest + 1)
    if largest >= n_experts:
        raise InputError(
            f"expert {largest} occurs, but there are {n_experts} experts",
            where=source,
            way_out="ids are physical where experts are replicated: keep "
            "last_physical_to_logical_map; a shared expert fused into the routed ones also "
            "reads like this",
        )
    geometry, missing = fit_geometry(
        source.stem,
        model,
        n_experts=n_experts,
        top_k=top_k,
        moe_layers=index.tolist(),
        n_layers=len(used),
        where=str(source),
    )
    header = Header(
        geometry=geometry,
        unknown=unknown + missing,
        provenance=Provenance(
            kind="imported", model=model, importer="sglang", note="expert distribution recorder"
        ),
    )
    requests, step = _Requests(), 0
    with TraceWriter(out, header) as writer:
        for item in passes:
            request = _requests_of(item, requests)
            ids = item.ids[:, index]
            for phase, tokens in _split(item):
                if not len(tokens):
                    continue
                part = _packed(ids[tokens], top_k).transpose(1, 0, 2).reshape(-1, top_k)
                writer.add(
                    request=np.tile(request[tokens], len(index)),
                    phase=phase,
                    step=step,
                    position=np.tile(item.positions[tokens], len(index)),
                    moe_layer=np.repeat(np.arange(len(index)), len(tokens)),
                    experts=part,
                    valid=(part != PAD).any(axis=1),
                )
                step += 1
    return header


def _passes(source: Path, rank: int | None) -> list[_Pass]:
    """Return the passes in order, ids logical, tokens without any id left out."""
    arrays = load_arrays(source)
    if any(name.endswith("logical_count") for name in arrays):
        raise InputError(
            "holds counts of experts, which cannot be replayed: their order is lost",
            where=source,
            way_out="record with --expert-distribution-recorder-mode per_token",
        )
    records: dict[int, dict[str, Any]] = {}
    for name, array in arrays.items():
        head, _, rest = name.partition("/")
        number, _, key = rest.partition("/")
        if head == "records" and number.isdigit() and key:
            records.setdefault(int(number), {})[key] = array
    if not records:
        raise InputError(
            f"no keys 'records/N/...' (found: {', '.join(sorted(arrays)[:5]) or 'nothing'})",
            where=source,
            way_out="docs/formats.md shows how to copy a recording into an .npz",
        )
    ranks = {int(record.get("rank", 0)) for record in records.values()}
    if rank is None and len(ranks) > 1:
        raise InputError(
            f"ranks {sorted(ranks)} recorded; with tensor parallelism they repeat each other",
            where=source,
            way_out="pick one: --option rank=0",
        )
    table = arrays.get("last_physical_to_logical_map")
    found = [
        item
        for number, record in sorted(records.items())
        if rank is None or int(record.get("rank", 0)) == rank
        for item in _pass(f"{source}: records/{number}", record, table)
    ]
    if not found:
        raise InputError("no routed tokens", where=source, way_out="record it again")
    shapes = {item.ids.shape[1] for item in found}
    if len(shapes) > 1:
        raise InputError(
            f"passes of {sorted(shapes)} layers", where=source, way_out="record one model at a time"
        )
    return found


def _pass(where: str, record: dict[str, Any], table: Any) -> Iterator[_Pass]:
    for key in _NEEDED:
        if key not in record:
            raise InputError(f"no key '{key}'", where=where, way_out="copy it from the recording")
    raw = np.asarray(record["topk_ids_of_layer"])
    ids = checked_ids(raw, f"{where}/topk_ids_of_layer").transpose(1, 0, 2)
    positions = np.asarray(record["positions"]).reshape(-1)
    said = str(np.asarray(record["forward_mode"]).reshape(-1)[0])
    mode = _MODES.get(said, said.rpartition(".")[2].lower())
    if mode not in _MODES.values():
        raise InputError(
            f"forward_mode {said}",
            where=where,
            way_out=f"known: {', '.join(_MODES.values())} (1, 2, 3); leave other passes out",
        )
    lengths = np.asarray(record.get("extend_seq_lens", [])).reshape(-1).astype(int).tolist()
    n = len(positions)
    if n > len(ids) or (mode != "decode" and sum(lengths) != n):
        raise InputError(
            f"{len(ids)} tokens, {n} positions, extend_seq_lens {lengths}",
            where=where,
            way_out="expected a position per token, and prompt lengths that add up to them",
        )
    ids = ids[:n]  # what is beyond pads the batch of a CUDA graph
    if table is not None:
        ids = to_logical(ids, table, where)
    if n and (ids != PAD).any():
        yield _Pass(where, ids, positions, mode, lengths)


def _requests_of(item: _Pass, requests: _Requests) -> Ints:
    """Return the request of each token of a pass."""
    lengths = [1] * len(item.positions) if item.mode == "decode" else item.lengths
    found, start = np.zeros(len(item.positions), np.int32), 0
    for length in lengths:
        run = item.positions[start : start + length]
        if not length:
            continue
        decode = item.mode == "decode" or (item.mode == "mixed" and length == 1 and run[0] > 0)
        number = requests.place(int(run[0]), int(run[-1]) + 1, decode=bool(decode))
        found[start : start + length] = number
        start += length
    return found


def _split(item: _Pass) -> Iterator[tuple[int, Ints]]:
    """Yield prefill and decode apart; in a mixed pass a run of one token past 0 is decode."""
    n = len(item.positions)
    if item.mode == "decode":
        yield DECODE, np.arange(n)
        return
    run = np.repeat(item.lengths, item.lengths)
    decode = (run == 1) & (item.positions > 0) & (item.mode == "mixed")
    yield PREFILL, np.flatnonzero(~decode)
    yield DECODE, np.flatnonzero(decode)


def _packed(ids: Ints, top_k: int) -> Ints:
    """Return ids (..., top_k): those in use moved to the front, in their order."""
    order = np.argsort(ids == PAD, axis=2, kind="stable")
    packed: Ints = np.take_along_axis(ids, order, axis=2)[..., :top_k]
    return packed
