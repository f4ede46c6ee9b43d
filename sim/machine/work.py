"""This module counts the work of a layer's dense part: operations and bytes, as plain sums.

Counted are attention (projections, scores over the context, keys and values read), the router,
shared experts, norms, layers without routed experts that come before, and the output head after the
last MoE layer. A multiply-add is two operations. Embedding look-ups and activations are left out:
they are below a thousandth of the weights in every published geometry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moetier.traces.batch import DECODE
from moetier.traces.errors import InputError
from moetier.traces.formats import dense_bytes, dense_layer_bytes, head_bytes
from moetier.traces.geometry import Geometry
from moetier.traces.schema import Header, Predictor

Ints = npt.NDArray[np.int64]
NO_WINDOW = 1 << 40  # entries; longer than any context


class Work(NamedTuple):
    """Operations and bytes, each an int or an array of int64."""

    ops: Ints
    nbytes: Ints


@dataclass(frozen=True, slots=True)
class DenseWork:
    """The dense work of every MoE layer, as coefficients of tokens and context: (layers,)."""

    weight_bytes: Ints
    token_ops: Ints  # per token
    head_ops: Ints  # per token whose logits are wanted
    context_ops: Ints  # per key/value entry seen, layers with full attention
    window_ops: Ints  # the same, layers with a sliding window
    context_bytes: Ints  # of one key/value entry, full attention
    window_bytes: Ints
    window: int
    decode_ops: Ints  # per token and in decode only: what a policy adds or spares
    decode_bytes: Ints
    head_bytes: Ints  # of the output head, which are part of weight_bytes
    model_layers: Ints  # how many layers of the model a MoE layer stands for

    def of(self, layer: Ints, phase: Ints, tokens: Ints, context: Ints) -> Work:
        """Return the work of batches given as arrays of equal shape.

        Prefill reads all keys and values that are there once, from chip memory beyond that, and
        wants one set of logits; decode reads the whole context for every token. With a sliding
        window both are a bound where the tokens' contexts differ.
        """
        decode = phase == DECODE
        # Of T tokens that follow p others, sum(position + 1) is T * (p + (T + 1) / 2).
        alive = np.maximum(tokens, context // tokens + (tokens - 1) // 2)
        windowed = np.minimum(context, self.window * tokens)
        ops = (
            self.token_ops[layer] * tokens
            + self.head_ops[layer] * np.where(decode, tokens, 1)
            + self.context_ops[layer] * context
            + self.window_ops[layer] * windowed
            + self.decode_ops[layer] * np.where(decode, tokens, 0)
        )
        nbytes = (
            self.weight_bytes[layer]
            + self.context_bytes[layer] * np.where(decode, context, alive)
            + self.window_bytes[layer] * np.where(decode, windowed, np.minimum(alive, windowed))
            + self.decode_bytes[layer] * decode
        )
        return Work(ops, nbytes)

    def mean_context(self, layer: int, tokens: int, context: int) -> Fraction:
        """Return the key/value entries that one of the layers *layer* stands for sees, on average.

        All *tokens* together; fewer than *context* where layers have a sliding window.
        """
        full, windowed = int(self.context_ops[layer]), int(self.window_ops[layer])
        if not windowed:
            return Fraction(context)
        seen = full * context + windowed * min(context, self.window * tokens)
        return Fraction(seen, full + windowed)


def dense_work(header: Header, weights: str, kv_bytes: int = 2) -> DenseWork:
    """Count the dense work of the model of *header*, its weights stored in the format *weights*.

    The bytes a trace records for that format come before those of the geometry; *kv_bytes* is the
    size of one number of the key/value cache. Operations are 2 per weight, so as many as the bytes
    of the same weights in bf16; where the geometry does not give them they count as zero.

    Raises:
        InputError: If neither the trace nor the geometry gives the size of the dense part.
    """
    geometry = header.geometry
    spans = _spans(geometry)
    recorded = header.dense_bytes if weights == header.weights else None
    try:
        token_ops = _dense_bytes(geometry, spans, "bf16")
    except InputError:
        if recorded is None:
            raise
        token_ops = np.zeros(len(spans), np.int64)
    stored = _recorded(header, spans) if recorded else _dense_bytes(geometry, spans, weights)
    head_ops, head = np.zeros((2, len(spans)), np.int64)
    head_ops[-1], head[-1] = head_bytes(geometry, "bf16"), head_bytes(geometry, weights)
    kinds = [[geometry.attention_of(layer) for layer in span] for span in spans]
    full, sliding = (np.array([span.count(kind) for span in kinds]) for kind in ("full", "sliding"))
    per_ops, per_bytes = _entry(geometry, kv_bytes)
    return DenseWork(
        weight_bytes=stored + head,
        token_ops=token_ops,
        head_ops=head_ops,
        context_ops=full * per_ops,
        window_ops=sliding * per_ops,
        context_bytes=full * per_bytes,
        window_bytes=sliding * per_bytes,
        window=geometry.sliding_window or NO_WINDOW,
        decode_ops=np.zeros(len(spans), np.int64),
        decode_bytes=np.zeros(len(spans), np.int64),
        head_bytes=head,
        model_layers=np.array([len(span) for span in spans]),
    )


def _dense_bytes(geometry: Geometry, spans: list[range], weights: str) -> Ints:
    """Return the bytes of the dense part that each MoE layer stands for."""
    moe = dict(zip(geometry.moe_layers, dense_bytes(geometry, weights), strict=True))
    others = [layer for span in spans for layer in span if layer not in moe]
    if others:
        moe.update(zip(others, dense_layer_bytes(geometry, weights), strict=True))
    return np.array([sum(moe[layer] for layer in span) for span in spans])


def _recorded(header: Header, spans: list[range]) -> Ints:
    """Return the bytes of the dense part that each MoE layer stands for, as the trace has them."""
    moe = header.geometry.moe_layers
    others = [layer for span in spans for layer in span if layer not in moe]
    nbytes = dict(zip(moe, header.dense_bytes or (), strict=True))
    if header.dense_layer_bytes is not None and len(header.dense_layer_bytes) == len(others):
        nbytes.update(zip(others, header.dense_layer_bytes, strict=True))
    return np.array([sum(nbytes.get(layer, 0) for layer in span) for span in spans])


def with_predictors(
    work: DenseWork, header: Header, predictors: Sequence[Predictor], replaces_router: bool
) -> DenseWork:
    """Return *work* with what *predictors* cost in decode, less the routers they replace.

    A predictor's weights are read in equal parts by the layers. The first layer keeps its router,
    whose weights count as bf16.
    """
    layers = len(work.weight_bytes)
    ops = np.full(layers, sum(item.operations or 0 for item in predictors))
    nbytes = np.full(layers, sum(-(-(item.nbytes or 0) // layers) for item in predictors))
    if replaces_router and header.geometry.hidden is not None:
        router = 2 * header.geometry.hidden * header.geometry.n_experts  # operations, and bytes
        ops[1:] -= router
        nbytes[1:] -= router
    return replace(work, decode_ops=ops, decode_bytes=nbytes)


def kv_bytes_at(work: DenseWork, context: int, requests: int) -> int:
    """Return the size of the key/value cache of *requests* sequences, *context* tokens in all."""
    windowed = min(context, work.window * requests)
    return int(work.context_bytes.sum() * context + work.window_bytes.sum() * windowed)


def _spans(geometry: Geometry) -> list[range]:
    """Return, per MoE layer, the model layers it stands for: those since the MoE layer before."""
    starts = [0, *[layer + 1 for layer in geometry.moe_layers[:-1]]]
    ends = [layer + 1 for layer in geometry.moe_layers]
    ends[-1] = max(ends[-1], geometry.n_layers or 0)
    return [range(start, end) for start, end in zip(starts, ends, strict=True)]


def _entry(geometry: Geometry, kv_bytes: int) -> tuple[int, int]:
    """Return (operations, bytes) of one key/value entry of one layer.

    Scores and values cost 2 operations each per head and width; with latent attention the joint
    key/value of rank `kv_lora` is used directly (absorbed projections) and shared by all heads.
    """
    heads = geometry.heads or 0
    if geometry.kv_lora:
        rope = geometry.rope_dim or 0
        return 2 * heads * (2 * geometry.kv_lora + rope), kv_bytes * (geometry.kv_lora + rope)
    width = geometry.head_dim or 0
    return 4 * heads * width, 2 * kv_bytes * (geometry.kv_heads or 0) * width
