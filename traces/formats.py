"""This module counts bytes: of an expert, and of everything beside it, in each weight format.

A matrix has rows of `columns` weights, stored in blocks; a block has a fixed number of bytes:

| type | weights | bytes | bits per weight | layout |
|------|---------|-------|-----------------|--------|
| f32 | 1 | 4 | 32 | |
| bf16, f16 | 1 | 2 | 16 | |
| int8 | 1 | 1 | 8 | scales (one per row) are not counted |
| mxfp4 | 32 | 17 | 4.25 | 32 codes of 4 bit and one 8-bit exponent (OCP MX v1.0) |
| q4_0 | 32 | 18 | 4.5 | 32 codes of 4 bit and an fp16 scale (ggml `block_q4_0`) |
| q5_0, q8_0 | 32 | 22, 34 | 5.5, 8.5 | as q4_0, with 5 or 8 bit |
| q4_k | 256 | 144 | 4.5 | ggml `block_q4_K` |
| q6_k | 256 | 210 | 6.5625 | ggml `block_q6_K` |

`q4_k_m` is llama.cpp's mixture: q4_k, with q6_k for `down` (experts, shared experts, MLP) and the
value matrix in the first and last eighth of the layers and every third between. Rows that are not
a multiple of 256 fall back from q4_k to q5_0 and from q6_k to q8_0. The rule gives the bytes of a
recorded Qwen3-30B-A3B file exactly, experts and dense parts. llama.cpp treats models with exactly 8
experts apart (larger attention matrices); that is not modelled. Biases are not counted in these
formats; bit slices count those of the experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.traces.schema import Header

WeightFormat = Literal["bf16", "fp16", "fp32", "int8", "q4_0", "q4_k_m", "mxfp4"]
FORMATS: tuple[str, ...] = get_args(WeightFormat)
DEFAULT_FORMAT = "bf16"

BLOCKS = {
    "f32": (1, 4),
    "bf16": (1, 2),
    "f16": (1, 2),
    "int8": (1, 1),
    "mxfp4": (32, 17),
    "q4_0": (32, 18),
    "q5_0": (32, 22),
    "q8_0": (32, 34),
    "q4_k": (256, 144),
    "q6_k": (256, 210),
}
"""Storage type -> (weights, bytes) of one block."""

_FALLBACK = {"q4_k": "q5_0", "q6_k": "q8_0"}


def matrix_bytes(rows: int, columns: int, kind: str) -> int:
    """Return the bytes of a matrix of *rows* x *columns* weights stored as *kind*."""
    if columns % BLOCKS[kind][0] and kind in _FALLBACK:
        kind = _FALLBACK[kind]
    weights, nbytes = BLOCKS[kind]
    return rows * -(-columns // weights) * nbytes


def expert_bytes(geometry: Geometry, weights: str) -> list[int]:
    """Return the bytes of one whole expert of each MoE layer in the format *weights*.

    Raises:
        InputError: If the format is unknown, or the geometry lacks the sizes that it takes.
    """
    kind = _kinds(weights).experts
    missing = [key for key in ("hidden", "moe_intermediate") if getattr(geometry, key) is None] + (
        ["n_layers"] if weights == "q4_k_m" and geometry.n_layers is None else []
    )
    _require(geometry, missing, "the size of an expert")
    hidden, inner = geometry.hidden or 0, geometry.moe_intermediate or 0
    return [
        _mlp(geometry.expert_matrices, hidden, inner, kind(False), kind(_more(layer, geometry)))
        for layer in geometry.moe_layers
    ]


def bit_slice_bytes(geometry: Geometry, high: int, low: int, group: int = 32) -> tuple[int, int]:
    """Return the bytes of one expert's MSB slice and of its LSB slice.

    Codes and zero-points have *high* bits; the MSB slice holds the *low* highest of them, the LSB
    slice the rest. A zero-point and a 16-bit scale belong to *group* weights of a row. Scales, and
    biases at 16 bit, are in the MSB slice. Gate and up are one matrix, down another; the codes of a
    matrix end on a whole byte, and so do its zero-points. This is what
    `validate.numerics.slices` packs, byte for byte.

    Raises:
        InputError: If the sizes of an expert are unknown, *low* < *high* <= 8 does not hold, or
            *group* does not divide the width of a matrix.
    """
    check_slice_bits(high, low)
    missing = [key for key in ("hidden", "moe_intermediate") if getattr(geometry, key) is None]
    _require(geometry, missing, "the size of an expert")
    hidden, inner = geometry.hidden or 0, geometry.moe_intermediate or 0
    msb = lsb = 0
    for rows, columns in (((geometry.expert_matrices - 1) * inner, hidden), (hidden, inner)):
        check_group(columns, group, geometry.name)
        groups = rows * columns // group
        for count in (rows * columns, groups):  # codes, zero-points
            msb += -(-count * low // 8)
            lsb += -(-count * (high - low) // 8)
        msb += 2 * groups + (2 * rows if geometry.expert_biases else 0)
    return msb, lsb


def check_slice_bits(high: int, low: int) -> None:
    """Raise `InputError` unless 1 <= *low* < *high* <= 8."""
    if not 1 <= low < high <= 8:
        raise InputError(
            f"bit slices of {high}/{low} bits are out of range",
            way_out="use 1 <= low < high <= 8, such as 8/4, 6/3 or 4/2",
        )


def check_group(columns: int, group: int, where: str | None = None) -> None:
    """Raise `InputError` unless *columns* weights of a row are a whole number of groups."""
    if group < 1 or columns % group:
        raise InputError(
            f"rows of {columns} weights have no whole number of groups of {group}",
            where=where,
            way_out="choose a group size that divides them",
        )


def dense_bytes(geometry: Geometry, weights: str) -> list[int]:
    """Return the bytes of each MoE layer that are not routed experts.

    That is attention, norms, router and shared experts. Embeddings are apart.

    Raises:
        InputError: If the format is unknown, or the geometry lacks the sizes that it takes.
    """
    return [_layer_bytes(geometry, weights, layer, moe=True) for layer in geometry.moe_layers]


def dense_layer_bytes(geometry: Geometry, weights: str) -> list[int]:
    """Return the bytes of each layer without routed experts, ascending; may be empty.

    Raises:
        InputError: If the format is unknown, or the geometry lacks the sizes that it takes.
    """
    _require(geometry, ["n_layers"] if geometry.n_layers is None else [], "the number of layers")
    others = sorted(set(range(geometry.n_layers or 0)) - set(geometry.moe_layers))
    return [_layer_bytes(geometry, weights, layer, moe=False) for layer in others]


def embedding_bytes(geometry: Geometry, weights: str) -> int:
    """Return the bytes of the token embedding, the LM head (unless tied) and the last norm.

    Raises:
        InputError: If the format is unknown, or vocabulary or hidden size are.
    """
    kinds = _kinds(weights)
    missing = [key for key in ("hidden", "vocab") if getattr(geometry, key) is None]
    _require(geometry, missing, "the size of the embeddings")
    hidden, vocab = geometry.hidden or 0, geometry.vocab or 0
    head = matrix_bytes(vocab, hidden, kinds.head)
    table = 0 if geometry.tied_embeddings else matrix_bytes(vocab, hidden, kinds.dense(False))
    return head + table + matrix_bytes(1, hidden, kinds.small)


def head_bytes(geometry: Geometry, weights: str) -> int:
    """Return the bytes of the LM head, read where a token's logits are wanted; 0 if unknown."""
    return matrix_bytes(geometry.vocab or 0, geometry.hidden or 0, _kinds(weights).head)


def stored_expert_bytes(header: Header, weights: str | None = None) -> tuple[str, list[int]]:
    """Return a format's name and the bytes of one expert per MoE layer.

    *weights* None: what the trace records, else bf16. A format that the trace records keeps the
    recorded bytes.

    Raises:
        InputError: If the format is unknown, or neither bytes nor sizes are known.
    """
    name = weights or header.weights or next(iter(header.expert_bytes), DEFAULT_FORMAT)
    if name in header.expert_bytes:
        return name, header.expert_bytes[name]
    if weights is None and name not in FORMATS:
        name = DEFAULT_FORMAT
    return name, expert_bytes(header.geometry, name)


@dataclass(frozen=True, slots=True)
class _Kinds:
    """Storage types of a format; a callable takes whether llama.cpp spends more bits here."""

    experts: Callable[[bool], str]
    dense: Callable[[bool], str]
    head: str
    small: str  # norms and router


def _constant(kind: str) -> Callable[[bool], str]:
    return lambda more: kind


def _k_m(more: bool) -> str:
    return "q6_k" if more else "q4_k"


_FORMATS = {
    "bf16": _Kinds(_constant("bf16"), _constant("bf16"), "bf16", "bf16"),
    "fp16": _Kinds(_constant("f16"), _constant("f16"), "f16", "f16"),
    "fp32": _Kinds(_constant("f32"), _constant("f32"), "f32", "f32"),
    "int8": _Kinds(_constant("int8"), _constant("int8"), "int8", "bf16"),
    "q4_0": _Kinds(_constant("q4_0"), _constant("q4_0"), "q6_k", "f32"),
    "q4_k_m": _Kinds(_k_m, _k_m, "q6_k", "f32"),
    # as GPT-OSS is published: the experts alone are 4 bit
    "mxfp4": _Kinds(_constant("mxfp4"), _constant("bf16"), "bf16", "bf16"),
}


def _kinds(weights: str) -> _Kinds:
    if weights not in _FORMATS:
        raise InputError(f"unknown weights '{weights}'", way_out=f"known: {', '.join(FORMATS)}")
    return _FORMATS[weights]


def _require(geometry: Geometry, missing: list[str], what: str) -> None:
    if missing:
        raise InputError(
            f"{what} of '{geometry.name}' is unknown: no {', '.join(missing)}",
            way_out="name a published geometry with `model:` (of a trace), or leave `weights` out: "
            "a checkpoint's own bytes are known",
        )


def _more(layer: int, geometry: Geometry) -> bool:
    """Return whether llama.cpp spends more bits on *layer* (`use_more_bits`, integer division)."""
    n = geometry.n_layers or 0
    return layer < n // 8 or layer >= 7 * n // 8 or (layer - n // 8) % 3 == 2


def _mlp(matrices: int, hidden: int, inner: int, kind: str, down: str) -> int:
    up = (matrices - 1) * matrix_bytes(inner, hidden, kind)
    return up + matrix_bytes(hidden, inner, down)


def _layer_bytes(geometry: Geometry, weights: str, layer: int, *, moe: bool) -> int:
    kinds = _kinds(weights)
    needed = ["hidden", "heads", "head_dim"]
    needed += ["n_layers"] if weights == "q4_k_m" else []
    needed += [] if moe else ["dense_intermediate"]
    needed += ["rope_dim"] if geometry.kv_lora is not None else ["kv_heads"]
    missing = [key for key in needed if getattr(geometry, key) is None]
    if geometry.attention_of(layer) == "linear":
        missing.append("shape of linear attention")
    _require(geometry, missing, "the size of the dense part")
    hidden = geometry.hidden or 0
    more = _more(layer, geometry)
    total = _attention(geometry, kinds, more) + 2 * matrix_bytes(1, hidden, kinds.small)
    down = kinds.dense(more)
    if not moe:
        inner = geometry.dense_intermediate or 0
        return total + _mlp(geometry.expert_matrices, hidden, inner, kinds.dense(False), down)
    total += matrix_bytes(geometry.n_experts, hidden, kinds.small)  # the router
    if geometry.shared_intermediate:
        inner = geometry.shared_intermediate
        total += _mlp(geometry.expert_matrices, hidden, inner, kinds.dense(False), down)
    return total


def _attention(geometry: Geometry, kinds: _Kinds, more: bool) -> int:
    hidden, heads, width = geometry.hidden or 0, geometry.heads or 0, geometry.head_dim or 0
    kind, value = kinds.dense(False), kinds.dense(more)
    output = matrix_bytes(hidden, heads * width, kind)
    if geometry.kv_lora is not None:
        # multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), queries not
        # compressed, head_dim the width of the part without position and of the values
        rank, rope = geometry.kv_lora, geometry.rope_dim or 0
        query = matrix_bytes(heads * (width + rope), hidden, kind)
        down = matrix_bytes(rank + rope, hidden, kind)
        up = matrix_bytes(heads * 2 * width, rank, kind)
        return query + down + up + output + matrix_bytes(1, rank, kinds.small)
    kv = (geometry.kv_heads or 0) * width
    query = matrix_bytes(heads * width, hidden, kind)
    norms = 2 * matrix_bytes(1, width, kinds.small) if geometry.qk_norm else 0
    return query + matrix_bytes(kv, hidden, kind) + matrix_bytes(kv, hidden, value) + output + norms
