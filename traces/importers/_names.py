"""This module finds a published geometry and a weight format in the name of a model file."""

from __future__ import annotations

import re

from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry, load_geometry, published

_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_QUANT = re.compile(
    r"[-._](?:UD-)?((?:I?Q\d\w*|TQ\d\w*|BF16|FP?16|F32|INT8|MXFP4\w*))$", re.IGNORECASE
)
_ALIASES = {"mxfp4_moe": "mxfp4"}


def split_model_name(name: str) -> tuple[str, str | None]:
    """Return the model and the weight format in *name*, the name or path of a model file.

    >>> split_model_name("models/Qwen3-30B-A3B-Q4_K_M.gguf")
    ('Qwen3-30B-A3B', 'q4_k_m')
    """
    stem = re.split(r"[/\\]", name)[-1].removesuffix(".gguf")
    stem = _SHARD.sub("", stem)
    found = _QUANT.search(stem)
    if found is None:
        return stem, None
    kind = found[1].lower()
    return stem[: found.start()], _ALIASES.get(kind, kind)


def find_published(name: str) -> Geometry | None:
    """Return the published geometry whose name begins *name*, the longest one; or None."""
    text = re.sub(r"[ _]", "-", name.lower())
    near = [known for known in published() if text == known or text.startswith(f"{known}-")]
    return load_geometry(max(near, key=len)) if near else None


def fit_geometry(
    name: str,
    model: str | None,
    *,
    n_experts: int,
    top_k: int,
    moe_layers: list[int],
    n_layers: int | None,
    where: str,
) -> tuple[Geometry, list[str]]:
    """Return a geometry for a trace, and what it does not know.

    *model* names a published geometry; without it, *name* is looked up among them. Their sizes are
    used where experts and layers agree with the trace; top-k is always the trace's.

    Raises:
        InputError: If *model* was named and does not agree with the trace.
    """
    known = load_geometry(model) if model is not None else find_published(name)
    if known is not None:
        wrong = _difference(known, n_experts, moe_layers, n_layers)
        if not wrong:
            return Geometry(**{**known.model_dump(), "top_k": top_k}), []
        if model is not None:
            raise InputError(
                f"model '{model}' does not fit the trace: {wrong}",
                where=where,
                way_out="name another model, or none",
            )
    shape = Geometry(
        name=name,
        n_experts=n_experts,
        top_k=top_k,
        moe_layers=moe_layers,
        n_layers=n_layers,
        source="the trace; sizes unknown",
    )
    missing = [
        key for key in ("hidden", "moe_intermediate", "heads") if getattr(shape, key) is None
    ]
    return shape, [f"geometry.{key}" for key in missing]


def _difference(
    known: Geometry, n_experts: int, moe_layers: list[int], n_layers: int | None
) -> str:
    if known.n_experts != n_experts:
        return f"it has {known.n_experts} experts, the trace {n_experts}"
    if n_layers is not None and known.n_layers != n_layers:
        return f"it has {known.n_layers} layers, the trace {n_layers}"
    if known.moe_layers != moe_layers:
        return f"its MoE layers are {known.moe_layers}, the trace's {moe_layers}"
    return ""
