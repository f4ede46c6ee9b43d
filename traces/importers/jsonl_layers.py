"""This module reads decode routing as JSON lines: `{"tok": 1, "layers": [[ids], ...]}` per token.

The format has no weights, no prompt and no model, so that much stays unknown in the header.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from moetier.traces.batch import DECODE
from moetier.traces.columns import PAD
from moetier.traces.errors import InputError
from moetier.traces.geometry import load_geometry
from moetier.traces.importers import register
from moetier.traces.importers._names import fit_geometry
from moetier.traces.io import TraceWriter
from moetier.traces.schema import Header, Provenance

TOKENS = 1024
"""Tokens that are held at a time."""

_MOST_TOKENS = np.iinfo(np.int32).max
_MOST_EXPERTS = np.iinfo(np.int16).max


@register("jsonl-layers")
def import_jsonl_layers(
    source: Path, out: Path, model: str | None = None, n_experts: int | None = None
) -> Header:
    """Import decode routing in JSON lines, a list of expert ids per layer and token.

    *model* names a published geometry; without it *n_experts* gives the number of experts, and
    without that it is the largest id plus one, which the header calls unknown. `tok` is taken as
    the position in the context. One request; every line is a forward step.

    Raises:
        InputError: If a line is malformed; names the line, the value and the way out.
    """
    source = Path(source)
    layers, top_k, largest = _survey(source)
    unknown = ["weights", "scores", "slot order", "prompt", "expert_bytes", "dense_bytes"]
    if model is not None:
        known = load_geometry(model)
        n_experts, moe_layers = n_experts or known.n_experts, known.moe_layers
        if len(moe_layers) != layers:
            moe_layers = list(range(layers))  # does not fit, which fit_geometry says
    else:
        moe_layers = list(range(layers))
        unknown += ["model", "layer"] + (["n_experts"] if n_experts is None else [])
    n_experts = largest + 1 if n_experts is None else n_experts
    if largest >= n_experts:
        raise InputError(
            f"expert {largest} occurs, but there are {n_experts} experts",
            where=source,
            way_out="name the right model or n_experts",
        )
    geometry, missing = fit_geometry(
        source.stem,
        model,
        n_experts=n_experts,
        top_k=top_k,
        moe_layers=moe_layers,
        n_layers=None,
        where=str(source),
    )
    header = Header(
        geometry=geometry,
        unknown=unknown + missing,
        provenance=Provenance(kind="imported", model=model, importer="jsonl-layers"),
    )
    tokens = _tokens(source)
    with TraceWriter(out, header) as writer:
        step = 0
        while some := list(islice(tokens, TOKENS)):
            n = len(some)
            experts = np.full((n, layers, top_k), PAD, np.int16)
            for i, (_, _, lists) in enumerate(some):
                for layer, ids in enumerate(lists):
                    experts[i, layer, : len(ids)] = ids
            writer.add(
                request=0,
                phase=DECODE,
                step=np.repeat(np.arange(step, step + n), layers),
                position=np.repeat([position for _, position, _ in some], layers),
                moe_layer=np.tile(np.arange(layers), n),
                experts=experts.reshape(-1, top_k),
            )
            step += n
    return header


def _survey(source: Path) -> tuple[int, int, int]:
    """Check all lines; return the number of layers, top-k and the largest id."""
    layers, top_k, largest = 0, 0, -1
    for line, _, lists in _tokens(source):
        layers = layers or len(lists)
        if len(lists) != layers:
            raise _bad(source, line, f"{len(lists)} layers, the lines before have {layers}")
        for ids in lists:
            top_k, largest = max(top_k, len(ids)), max(largest, *ids, -1)
    if not layers:
        raise InputError("no tokens", where=source, way_out="record it again")
    if largest < 0:
        raise InputError("no expert ids", where=source, way_out="record it again")
    return layers, top_k, largest


def _tokens(source: Path) -> Iterator[tuple[int, int, list[list[int]]]]:
    """Yield the line number, position and ids per layer of each token."""
    if not source.is_file():
        raise InputError("no such file", where=source, way_out="name a .jsonl file")
    with source.open(encoding="utf-8", errors="replace") as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                item = json.loads(text)
            except ValueError as error:
                raise _bad(source, line, f"not JSON ({error})") from None
            yield line, *_token(source, line, item)


def _token(source: Path, line: int, item: Any) -> tuple[int, list[list[int]]]:
    if not isinstance(item, dict) or not {"tok", "layers"} <= item.keys():
        raise _bad(source, line, "no keys 'tok' and 'layers'")
    position, lists = item["tok"], item["layers"]
    if type(position) is not int or not 0 <= position <= _MOST_TOKENS:
        raise _bad(source, line, f"tok {position!r} is not a token number")
    if not isinstance(lists, list) or not lists:
        raise _bad(source, line, "'layers' is not a list of lists")
    for layer, ids in enumerate(lists):
        if not isinstance(ids, list):
            raise _bad(source, line, f"layer {layer} is {ids!r}, not a list")
        for expert in ids:
            if type(expert) is not int or not 0 <= expert <= _MOST_EXPERTS:
                raise _bad(source, line, f"layer {layer}: {expert!r} is not an expert id")
        if len(set(ids)) < len(ids):
            raise _bad(source, line, f"layer {layer}: an expert appears twice in {ids}")
    return position, lists


def _bad(source: Path, line: int, problem: str) -> InputError:
    return InputError(f"line {line}: {problem}", where=source, way_out="repair or remove the line")
