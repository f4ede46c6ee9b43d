"""This module writes down everything about a captured model that is not routing."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch

from moetier.traces.capture.describe import describe, model_name
from moetier.traces.capture.fingerprint import fingerprint
from moetier.traces.capture.nbytes import (
    FORMATS,
    dense_bytes,
    dense_layer_bytes,
    expert_bytes,
    stored_dtype,
)
from moetier.traces.capture.probe import Probe
from moetier.traces.capture.prompts import prompts_sha256
from moetier.traces.schema import Header, Provenance


def build_header(
    model: Any, tokenizer: Any, prompts: Sequence[str], seen: Probe, seed: int
) -> Header:
    """Return the header of a capture of *prompts*, which it holds only as a hash."""
    dtype = stored_dtype(model, seen.layers)
    name = FORMATS.get(dtype, str(dtype).removeprefix("torch."))
    geometry = describe(model, seen)
    return Header(
        geometry=geometry,
        weights=name,
        expert_bytes={name: expert_bytes(seen.layers, dtype)},
        dense_bytes=dense_bytes(seen.layers, dtype),
        dense_layer_bytes=dense_layer_bytes(model, seen.layers, dtype),
        score_kind=seen.score_kind,
        unknown=[] if seen.gate is not None else ["router scores"],
        provenance=Provenance(
            kind="captured",
            model=model_name(model),
            model_fingerprint=fingerprint(model),
            tokenizer=type(tokenizer).__name__,
            prompts_sha256=prompts_sha256(prompts),
            dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
            seed=seed,
            versions={
                "moetier": version("moetier"),
                "torch": torch.__version__,
                "transformers": version("transformers"),
            },
            note=f"experts implementation: {_implementation(model)}",
        ),
    )


def _implementation(model: Any) -> str:
    return str(getattr(model.config.get_text_config(), "_experts_implementation", None))
