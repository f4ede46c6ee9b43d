"""This module reads SGLang's expert distribution recorder and its per-request routed experts.

The recorder (`per_pass`, `per_token`) saves .pt files, which are pickles and therefore not read
here; docs/formats.md shows how to copy one into an .npz, whose keys are `records/N/NAME` with the
recorder's names (`topk_ids_of_layer` (layers, tokens, 8) padded with -1, `positions`,
`extend_seq_lens`, `forward_mode`, `forward_pass_id`, `rank`) and `last_physical_to_logical_map`.
`return_routed_experts` gives responses with base64 of bare int32 ids of all layers; .json, .jsonl.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moetier.traces.errors import InputError
from moetier.traces.geometry import load_geometry
from moetier.traces.importers import register
from moetier.traces.importers._routed import (
    Routed,
    checked_ids,
    decode_base64,
    expected_rows,
    import_routed,
    read_responses,
)
from moetier.traces.importers._sglang_passes import import_passes
from moetier.traces.registry import Natural, Positive
from moetier.traces.schema import Header

_WIRE = {"int32": "<i4", "uint16": "<u2", "uint8": "u1"}


@register("sglang")
def import_sglang(
    source: Path,
    out: Path,
    model: str | None = None,
    n_experts: int | None = None,
    n_layers: Positive | None = None,
    top_k: Positive | None = None,
    rank: Natural | None = None,
) -> Header:
    """Import what SGLang recorded: .npz of the recorder's passes, or responses as .json or .jsonl.

    *model* names a published geometry; without it *n_experts* gives the number of experts, and a
    response needs *n_layers* and *top_k*. *rank* picks one rank where several recorded.

    Raises:
        InputError: If the file is not of these shapes; names the key or line and the way out.
    """
    source = Path(source)
    if source.suffix == ".pt":
        raise InputError(
            "is a pickle, and nothing is unpickled here",
            where=source,
            way_out="copy its arrays into an .npz with the lines in docs/formats.md",
        )
    if not source.is_file() or source.suffix not in (".npz", ".json", ".jsonl"):
        raise InputError(
            "no such file" if not source.exists() else "is not .npz, .json or .jsonl",
            where=source,
            way_out="docs/formats.md says how to save what SGLang recorded",
        )
    if source.suffix == ".npz":
        return import_passes(source, out, model=model, n_experts=n_experts, rank=rank, top_k=top_k)
    if model is not None:
        known = load_geometry(model)
        n_layers, top_k = n_layers or known.n_layers, top_k or known.top_k
    if n_layers is None or top_k is None:
        raise InputError(
            "ids without a shape",
            where=source,
            way_out="name the model, or give --option n_layers=N and --option top_k=K",
        )
    layers, k = n_layers, top_k
    return import_routed(
        out,
        lambda: _from_responses(source, layers, k),
        source=source,
        importer="sglang",
        model=model,
        n_experts=n_experts,
    )


def _from_responses(source: Path, n_layers: int, top_k: int) -> Iterator[Routed]:
    for where, item in read_responses(source):
        meta: Any = item.get("meta_info")
        here = f"{where}: meta_info.routed_experts"
        if not isinstance(meta, dict) or "routed_experts" not in meta:
            raise InputError("missing", where=here, way_out="ask with return_routed_experts: true")
        dtype = meta.get("routed_experts_dtype", "int32")
        if dtype not in _WIRE:
            raise InputError(
                f"routed_experts_dtype {dtype!r}", where=where, way_out=f"known: {', '.join(_WIRE)}"
            )
        data = decode_base64(meta["routed_experts"], here)
        size = n_layers * top_k * np.dtype(_WIRE[dtype]).itemsize
        if not data or len(data) % size:
            raise InputError(
                f"{len(data)} bytes are no whole number of tokens of {n_layers} layers and "
                f"top-{top_k} in {dtype}",
                where=here,
                way_out="name the right model, or n_layers and top_k; all layers count, also "
                "those without experts",
            )
        ids = checked_ids(np.frombuffer(data, _WIRE[dtype]).reshape(-1, n_layers, top_k), here)
        prompt = expected_rows(
            len(ids), meta.get("prompt_tokens"), meta.get("completion_tokens"), here
        )
        yield Routed(here, ids, prompt)
