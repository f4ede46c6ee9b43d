"""This module reads a model's geometry from its configuration and modules."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from torch import nn

from moetier.traces.capture.find import MoeLayer, dense_layers
from moetier.traces.capture.probe import Probe
from moetier.traces.geometry import AttentionKind, Geometry

ATTENTION: dict[str, AttentionKind] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "sliding",
    "linear_attention": "linear",
    "conv": "linear",
    "mamba": "linear",
}
_QUERY_NORM = ("q_norm", "query_layernorm", "q_layernorm")
_DOWN = ("down_proj", "w2", "output_linear")  # what the last matrix of an MLP is called


def describe(model: Any, probe: Probe) -> Geometry:
    """Return the geometry of *model*; what its configuration and modules do not say is None."""
    config = model.config.get_text_config()
    attention, unverified = _attention(config)
    heads = _number(config, "num_attention_heads")
    hidden = _number(config, "hidden_size")
    latent = _number(config, "kv_lora_rank") is not None  # whose head_dim is the rotary part
    head_dim = _number(config, "v_head_dim" if latent else "head_dim")
    if head_dim is None and heads and hidden:
        head_dim = hidden // heads
    first = probe.layers[0]
    return Geometry(
        name=model_name(model),
        n_experts=probe.n_experts,
        top_k=probe.top_k,
        moe_layers=[where.layer for where in probe.layers],
        n_layers=_number(config, "num_hidden_layers"),
        hidden=hidden,
        moe_intermediate=_expert_width(first),
        expert_matrices=3 if getattr(first.experts, "has_gate", True) else 2,
        expert_biases=bool(getattr(first.experts, "has_bias", False)),
        shared_intermediate=_shared_width(first),
        dense_intermediate=_dense_width(model, probe.layers),
        heads=heads,
        kv_heads=_number(config, "num_key_value_heads") or heads,
        head_dim=head_dim,
        qk_norm=_normalises_heads((where.decoder for where in probe.layers), head_dim),
        kv_lora=_number(config, "kv_lora_rank"),
        rope_dim=_number(config, "qk_rope_head_dim"),
        vocab=_number(config, "vocab_size"),
        tied_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        sliding_window=_window(config, attention),
        attention=attention,
        norm_topk=_normalised(config, probe),
        unverified=unverified,
        source="the configuration and modules of the captured model",
    )


def model_name(model: Any) -> str:
    """Return a name for *model* without a path of this machine in it."""
    name = str(getattr(model.config, "name_or_path", "") or "")
    if not name:
        return str(model.config.model_type)
    path = Path(name)
    return path.resolve().name if path.is_absolute() or path.exists() else name


def _expert_width(where: MoeLayer) -> int:
    experts: Any = where.experts
    shape = experts.down_proj.shape  # (E, H, I), transposed (E, I, H)
    return int(shape[1] if experts.is_transposed else shape[2])


def _shared_width(where: MoeLayer) -> int:
    """Return the width of what runs for every token beside the routed experts."""
    for name, child in where.block.named_children():
        beside = "shared" in name and "gate" not in name
        if beside or (where.block is where.decoder and name == "mlp"):
            return _mlp_width(child) or 0
    return _mlp_width(getattr(where.decoder, "shared_mlp", None)) or 0


def _dense_width(model: nn.Module, layers: list[MoeLayer]) -> int | None:
    """Return the width of the MLP of a layer without routed experts, None if there is none."""
    widths = (_mlp_width(decoder) for decoder in dense_layers(model, layers))
    return next((width for width in widths if width), None)


def _normalises_heads(decoders: Iterable[nn.Module], head_dim: int | None) -> bool:
    """Tell whether some attention normalises its queries, each head on its own."""
    return any(
        name.rpartition(".")[2] in _QUERY_NORM
        and any(value.numel() == head_dim for value in part.parameters(recurse=False))
        for decoder in decoders
        for name, part in decoder.named_modules()
    )


def _mlp_width(module: nn.Module | None) -> int | None:
    if module is None:
        return None
    for name, part in module.named_modules():
        if name.rpartition(".")[2] in _DOWN and hasattr(part, "in_features"):
            return int(cast(nn.Linear, part).in_features)
    return None


def _attention(config: Any) -> tuple[list[AttentionKind] | None, list[str]]:
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if not types:
        return None, []
    types = [kind for kind in types if kind not in ("moe", "mlp")]
    unknown = sorted({str(kind) for kind in types if kind not in ATTENTION})
    if unknown or len(types) != getattr(config, "num_hidden_layers", None):
        return None, [f"attention: {', '.join(unknown) or 'not one per layer'}"]
    kinds: list[AttentionKind] = [ATTENTION[kind] for kind in types]
    return (None if set(kinds) == {"full"} else kinds), []


def _window(config: Any, attention: list[AttentionKind] | None) -> int | None:
    if attention is not None and "sliding" not in attention:
        return None
    used = getattr(config, "use_sliding_window", True)
    return _number(config, "sliding_window") if used else None


def _normalised(config: Any, probe: Probe) -> bool:
    if probe.gate is not None and probe.gate.base != "none":
        return probe.gate.normalised
    said = getattr(config, "norm_topk_prob", None)
    return probe.weights_sum_to_one if said is None else bool(said)


def _number(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
