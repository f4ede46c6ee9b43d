"""This module reads moe-policylang's traces: JSON lines with short keys after a header, or Parquet.

A line is one token at one layer: `p` prompt, `t` token, `l` layer of the model, `e` experts, `s`
their scores, `sm` the softmax of all experts, `lg_l` their logits, `ph` prefill or decode. The
recorder makes `e` and `s` from softmax(logits): right for plain gates, wrong for gates with a bias
or groups, and `s` is not renormalised.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moetier.traces.batch import DECODE, PHASES, PREFILL
from moetier.traces.columns import PAD
from moetier.traces.errors import InputError
from moetier.traces.importers import register
from moetier.traces.importers._names import fit_geometry
from moetier.traces.io import TraceWriter
from moetier.traces.registry import Positive
from moetier.traces.schema import Header, Provenance, ScoreKind

_LONG = {
    "prompt_id": "p", "token_idx": "t", "layer_idx": "l", "selected_experts": "e",
    "router_scores": "s", "router_softmax": "sm", "router_logits": "lg_l", "phase": "ph",
}  # fmt: skip
_MOST = np.iinfo(np.int16).max


class _Row(NamedTuple):
    prompt: int
    token: int
    layer: int
    experts: list[int]
    weights: list[float] | None
    scores: dict[str, list[float]]
    phase: str | None


@register("moe-policylang")
def import_moe_policylang(
    source: Path,
    out: Path,
    model: str | None = None,
    n_experts: Positive | None = None,
    phase: Literal["prefill", "decode"] | None = None,
) -> Header:
    """Import a moe-policylang trace, .jsonl or .parquet; a prompt becomes a request.

    *phase* is that of all tokens in a trace that does not say it. *model* names a published
    geometry; a Parquet file, which has no header, may need it or *n_experts*.

    Raises:
        InputError: If a row is malformed; names the line or row, the value and the way out.
    """
    source = Path(source)
    if not source.is_file():
        raise InputError("no such file", where=source, way_out="name a .jsonl or .parquet trace")
    told = {} if source.suffix == ".parquet" else _told(source)
    top_k, largest, weighted = 0, -1, True
    layers: set[int] = set()
    widths: set[int] = set()
    kinds: set[str] | None = None
    for where, row in _rows(source):
        top_k, largest = max(top_k, len(row.experts)), max(largest, *row.experts, -1)
        layers.add(row.layer)
        kinds = set(row.scores) if kinds is None else kinds & set(row.scores)
        widths.update(len(values) for values in row.scores.values())
        weighted = weighted and row.weights is not None
        if row.phase is None and phase is None:
            raise InputError(
                "does not say whether it is prefill or decode",
                where=where,
                way_out="record with record_phase=True, or give --option phase=decode",
            )
    if largest < 0:
        raise InputError("no routed tokens", where=source, way_out="record it again")
    unknown = ["expert_bytes", "dense_bytes", "norm_topk"] + ([] if weighted else ["weights"])
    n_experts = n_experts or told.get("num_experts") or max(widths, default=0)
    if not n_experts:
        n_experts, unknown = largest + 1, [*unknown, "n_experts"]
    top_k = max(top_k, told.get("top_k") or 0)
    if largest >= n_experts or top_k > n_experts or widths - {n_experts}:
        raise InputError(
            f"expert {largest}, top-{top_k} and scores of {sorted(widths)} experts do not fit "
            f"{n_experts} experts",
            where=source,
            way_out="give the right --option n_experts=N",
        )
    kind: ScoreKind = "logits" if "logits" in (kinds or ()) else "none"
    if kind == "none" and "probabilities" in (kinds or ()):
        kind = "probabilities"
    name = told.get("model_name") or source.stem
    geometry, missing = fit_geometry(
        name.rpartition("/")[2],
        model,
        n_experts=n_experts,
        top_k=top_k,
        moe_layers=sorted(layers),
        n_layers=None,
        where=str(source),
    )
    header = Header(
        geometry=geometry,
        score_kind=kind,
        unknown=unknown + (["scores"] if kind == "none" else []) + missing,
        provenance=Provenance(
            kind="imported",
            model=name,
            importer="moe-policylang",
            note="experts and weights are the top of softmax(logits), not renormalised",
        ),
    )
    with TraceWriter(out, header) as writer:
        step = 0
        seen: set[int] = set()
        for prompt, group in groupby(_rows(source), key=lambda item: item[1].prompt):
            if prompt in seen:
                raise InputError(
                    f"prompt {prompt} comes back after another one",
                    where=source,
                    way_out="sort the rows by prompt",
                )
            seen.add(prompt)
            step += _add(writer, header, [row for _, row in group], step, phase, source)
    return header


def _add(
    writer: TraceWriter,
    header: Header,
    rows: list[_Row],
    first: int,
    phase: str | None,
    source: Path,
) -> int:
    """Write the rows of one prompt and return its number of steps."""
    codes = np.array([PHASES.index(row.phase or phase or "") for row in rows])
    token, layer = (np.array([row[i] for row in rows]) for i in (1, 2))
    moe_layer = np.searchsorted(header.geometry.moe_layers, layer)
    prefill = token[codes == PREFILL]
    if len(prefill) and (token[codes == DECODE] <= prefill.max()).any():
        raise InputError(
            f"prompt {rows[0].prompt}: a decoded token comes before token {prefill.max()} of "
            "the prefill",
            where=source,
            way_out="record it again",
        )
    decoded = np.unique(token[codes == DECODE])
    offset = int(len(prefill) > 0)
    step = np.where(codes == DECODE, np.searchsorted(decoded, token) + offset, 0)
    order = np.lexsort((token, moe_layer, step))
    k = header.geometry.top_k
    experts = np.full((len(rows), k), PAD, np.int16)
    weights = np.zeros((len(rows), k), np.float32)
    for at, i in enumerate(order.tolist()):
        row = rows[i]
        experts[at, : len(row.experts)] = row.experts
        weights[at, : len(row.experts)] = np.nan if row.weights is None else row.weights
    weights[np.isnan(weights).any(axis=1)] = np.nan
    kind = header.score_kind
    writer.add(
        request=rows[0].prompt,
        phase=codes[order],
        step=first + step[order],
        position=token[order],
        moe_layer=moe_layer[order],
        experts=experts,
        weights=weights,
        valid=(experts != PAD).any(axis=1),
        scores=None if kind == "none" else [rows[i].scores[kind] for i in order.tolist()],
    )
    return offset + len(decoded)


def _told(source: Path) -> dict[str, Any]:
    """Return the header line."""
    with source.open(encoding="utf-8", errors="replace") as file:
        text = file.readline()
    try:
        told = json.loads(text)
    except ValueError:
        told = None
    counts = ("num_layers", "num_experts", "top_k")
    if not isinstance(told, dict) or any(type(told.get(key)) is not int for key in counts):
        raise InputError(
            f"line 1: expected a header with {', '.join(counts)}, got {text[:40].strip()!r}",
            where=source,
            way_out="is it a trace of moe-policylang?",
        )
    return told


def _rows(source: Path) -> Iterator[tuple[str, _Row]]:
    raw = _parquet(source) if source.suffix == ".parquet" else _lines(source)
    for where, item in raw:
        yield where, _row(where, item)


def _lines(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with source.open(encoding="utf-8", errors="replace") as file:
        for line, text in enumerate(file, start=1):
            if line == 1 or not text.strip():
                continue
            where = f"{source}: line {line}"
            try:
                item = json.loads(text)
            except ValueError as error:
                raise InputError(
                    f"not JSON ({error})", where=where, way_out="repair or remove the line"
                ) from None
            yield where, item


def _parquet(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with pq.ParquetFile(source) as file:
            names = [name for name in file.schema_arrow.names if name in _LONG]
            if "selected_experts" not in names:
                raise InputError(
                    "no column 'selected_experts'",
                    where=source,
                    way_out="the top of a softmax is not what every gate chooses; record it again",
                )
            row = 0
            for batch in file.iter_batches(4096, columns=names):
                for item in batch.to_pylist():
                    yield f"{source}: row {row}", {_LONG[key]: value for key, value in item.items()}
                    row += 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot be read as Parquet ({error})", where=source, way_out="record it again"
        ) from None


def _row(where: str, item: Any) -> _Row:
    def bad(problem: str) -> InputError:
        return InputError(problem, where=where, way_out="repair or remove it")

    if not isinstance(item, dict):
        raise bad("is no object")
    numbers = [item.get("p", 0), item.get("t"), item.get("l")]
    for key, value in zip("ptl", numbers, strict=True):
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise bad(f"key '{key}': {value!r} is not a whole number from 0")
    if numbers[2] > _MOST:
        raise bad(f"key 'l': there is no layer {numbers[2]}")
    experts = item.get("e")
    if not isinstance(experts, list) or not all(type(e) is int for e in experts):
        raise bad(f"key 'e': {experts!r} is not a list of experts")
    experts = [e for e in experts if e >= 0]  # -1 fills up
    if len(set(experts)) < len(experts) or any(e > _MOST for e in experts):
        raise bad(f"key 'e': an expert twice, or too large, in {experts}")
    weights = item.get("s")
    if weights is not None and len(weights) != len(item["e"]):
        raise bad(f"{len(weights)} scores for {len(item['e'])} experts")
    if weights is not None:
        weights = [w for w, e in zip(weights, item["e"], strict=True) if e >= 0]
    phase = item.get("ph")
    if phase is not None and phase not in PHASES:
        raise bad(f"key 'ph': {phase!r} is neither prefill nor decode")
    scores = {
        kind: item[key]
        for key, kind in (("sm", "probabilities"), ("lg_l", "logits"))
        if item.get(key) is not None
    }
    prompt, token, layer = numbers
    return _Row(prompt, token, layer, experts, weights, scores, phase)
