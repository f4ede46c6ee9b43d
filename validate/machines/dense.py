"""This module really does the dense part of a layer: its matrix products, and its attention.

What `sim.machine.work` counts is what is read here: the weights of the dense part in one product of
their true size, the output head in another, and the keys and values of the context, one attention
per model layer that a MoE layer stands for. The numbers are random; nothing follows from them.

Shapes: T tokens, H hidden, D the width of a key, N entries of the key/value cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moetier.sim.machine.work import NO_WINDOW, DenseWork
from moetier.traces.batch import DECODE, LayerBatch
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.validate.machines.experts import CPU
from moetier.validate.machines.random_weights import TORCH_DTYPES, random_weights
from moetier.validate.machines.slots import require_memory

QUERIES_AT_ONCE = 256
"""In a prefill: each block of queries sees the keys up to its own end."""

Require = Callable[[int, str], None]
"""Raises `InputError` where a number of bytes for something cannot be had."""

_CACHE_DTYPES = {2: torch.bfloat16, 4: torch.float32}  # by bytes per number


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """How a model attends: *groups* key heads, each shared by *queries* query heads."""

    groups: int
    queries: int
    key: int  # D
    value: int  # width of a value; below D the values are the first part of the keys
    joint: bool  # are values stored with the keys, as in latent attention?

    @property
    def numbers(self) -> int:
        """Return how many numbers one entry of the key/value cache has."""
        return self.groups * (self.key if self.joint else self.key + self.value)


def attention_shape(geometry: Geometry) -> AttentionShape | None:
    """Return how the model of *geometry* attends; None where it does not say."""
    heads, width = geometry.heads or 0, geometry.head_dim or 0
    if geometry.kv_lora and heads:
        key = geometry.kv_lora + (geometry.rope_dim or 0)
        return AttentionShape(1, heads, key, geometry.kv_lora, True)
    groups = geometry.kv_heads or 0
    if not (heads and groups and width):
        return None
    return AttentionShape(groups, max(heads // groups, 1), width, width, False)


class Dense:
    """The dense part of every MoE layer, with weights and key/value cache in memory."""

    def __init__(
        self,
        work: DenseWork,
        geometry: Geometry,
        weights: str = "bf16",
        *,
        context: int = 0,
        seed: int = 0,
        device: torch.device = CPU,
        require: Require = require_memory,
    ) -> None:
        """Make the weights, and room for *context* key/value entries; it grows where more come.

        They are on *device*; *require* raises where a number of bytes for something is not there.

        Weights of a format that torch has no type for are stored as as many bytes of bf16.

        Raises:
            InputError: If the geometry lacks the hidden width, or the memory does not suffice.
        """
        if geometry.hidden is None:
            raise InputError(
                f"the hidden width of '{geometry.name}' is unknown",
                way_out="use a geometry with `hidden` for real machines",
            )
        self.hidden, self._work, self._seed = geometry.hidden, work, seed
        self._device, self._require = device, require
        self._kind = weights if weights in TORCH_DTYPES else "bf16"
        self.dtype: torch.dtype = getattr(torch, TORCH_DTYPES[self._kind])
        row = self.hidden * self.dtype.itemsize
        head = _head_bytes(work) // row
        body = work.weight_bytes // row - head
        self._rows = np.stack([body, body + work.decode_bytes // row])  # by phase
        require(int(self._rows.max(0).sum() + head.sum()) * row, "dense weights")
        self._body = [self._matrix(n, 0, at) for at, n in enumerate(self._rows.max(0).tolist())]
        self._head = [self._matrix(n, 1, at) for at, n in enumerate(head.tolist())]
        self._shape = attention_shape(geometry)
        self._caches = [] if self._shape is None else self._make_caches(self._shape)
        self.reserve(context)

    def run(self, batch: LayerBatch, x: Tensor) -> None:
        """Do the dense part of *batch*, whose hidden states are *x* (T, H), of the dense dtype."""
        layer = batch.layer
        with torch.inference_mode():
            F.linear(x, self._body[layer][: self._rows[int(batch.phase == DECODE), layer]])
            if self._caches:
                self._attend(batch)
            if len(self._head[layer]):
                F.linear(x if batch.phase == DECODE else x[-1:], self._head[layer])

    def nbytes(self, batch: LayerBatch) -> int:
        """Return how many bytes of weights and cache `run` reads for *batch*."""
        layer = batch.layer
        rows = int(self._rows[int(batch.phase == DECODE), layer]) + len(self._head[layer])
        total = rows * self.hidden * self.dtype.itemsize
        if self._shape is not None:
            for cache in self._caches[layer]:
                seen = cache.seen(batch) * (batch.n_tokens if batch.phase == DECODE else 1)
                total += seen * self._shape.numbers * cache.dtype.itemsize
        return total

    def reserve(self, context: int) -> None:
        """Make room for *context* key/value entries beforehand."""
        for caches in self._caches:
            for cache in caches:
                cache.reserve(context)

    def _matrix(self, rows: int, *which: int) -> Tensor:
        nbytes = rows * self.hidden * self.dtype.itemsize
        drawn = random_weights(nbytes, self._kind, self.hidden, self._seed, *which)
        return torch.from_numpy(drawn).to(self._device).view(self.dtype).view(rows, self.hidden)

    def _make_caches(self, shape: AttentionShape) -> list[list[_Cache]]:
        """Return an empty cache per model layer, of the numbers that the work counts."""
        work = self._work
        made: list[list[_Cache]] = []
        per_layer = zip(
            work.context_ops.tolist(), work.window_ops.tolist(),
            work.context_bytes.tolist(), work.window_bytes.tolist(), strict=True,
        )  # fmt: skip
        ops = 2 * shape.groups * shape.queries * (shape.key + shape.value)  # per entry and layer
        for full_ops, window_ops, full_bytes, window_bytes in per_layer:
            full, sliding = full_ops // ops, window_ops // ops
            if not full + sliding:
                made.append([])
                continue
            size = (full_bytes + window_bytes) // (full + sliding) // shape.numbers
            if size not in _CACHE_DTYPES:
                raise InputError(
                    f"numbers of the key/value cache have {size} bytes",
                    where="kv_bytes",
                    way_out="use 2 or 4 on a real machine",
                )
            windows = [NO_WINDOW] * full + [work.window] * sliding
            made.append(
                [
                    _Cache(shape, window, _CACHE_DTYPES[size], self._device, self._require)
                    for window in windows
                ]
            )
        return made

    def _attend(self, batch: LayerBatch) -> None:
        for cache in self._caches[batch.layer]:
            if batch.phase == DECODE:
                cache.decode(batch)
            else:
                cache.prefill(batch)


class _Cache:
    """The keys and values of one model layer."""

    def __init__(
        self,
        shape: AttentionShape,
        window: int,
        dtype: torch.dtype,
        device: torch.device,
        require: Require,
    ) -> None:
        self.dtype, self._shape, self._window = dtype, shape, window
        self._require = require
        self._like: dict[str, Any] = {"dtype": dtype, "device": device}
        self._keys = self._values = torch.empty(shape.groups, 0, shape.key, **self._like)
        self._queries: dict[int, Tensor] = {}

    def seen(self, batch: LayerBatch) -> int:
        """Return how many entries each token of a decode, or all of a prefill, read."""
        each = batch.context // max(batch.n_tokens, 1)
        if batch.phase != DECODE:  # see DenseWork.of: T tokens that follow p others
            each = max(batch.n_tokens, each + (batch.n_tokens - 1) // 2)
        return min(each, self._window * (batch.n_tokens if batch.phase != DECODE else 1))

    def reserve(self, entries: int) -> None:
        """Make room for *entries*; what was there is made anew."""
        entries = min(entries, self._window)
        if entries <= self._keys.shape[1]:
            return
        shape = self._shape
        wanted = entries * shape.numbers * self.dtype.itemsize
        self._require(wanted, "key/value cache")
        with torch.inference_mode():
            self._keys = torch.ones(shape.groups, entries, shape.key, **self._like)
            self._values = (
                self._keys[..., : shape.value]
                if shape.joint
                else torch.ones(shape.groups, entries, shape.value, **self._like)
            )

    def decode(self, batch: LayerBatch) -> None:
        """Let every token read a context of its own."""
        each = self.seen(batch)
        self._grow(each * batch.n_tokens)
        for token in range(batch.n_tokens):
            self._attend(1, token * each, (token + 1) * each)

    def prefill(self, batch: LayerBatch) -> None:
        """Let the tokens read what is there up to their own place, block by block."""
        end = self.seen(batch)
        self._grow(end)
        before = end - batch.n_tokens
        for at in range(0, batch.n_tokens, QUERIES_AT_ONCE):
            n = min(QUERIES_AT_ONCE, batch.n_tokens - at)
            self._attend(n, 0, max(before + at + n, 1))

    def _grow(self, entries: int) -> None:
        """Make room where a batch needs more than was reserved, and for as many again."""
        if entries > self._keys.shape[1]:
            self.reserve(2 * entries)

    def _attend(self, tokens: int, begin: int, end: int) -> None:
        shape = self._shape
        q = self._queries.get(tokens)
        if q is None:
            q = self._queries[tokens] = torch.ones(
                1, shape.groups, shape.queries * tokens, shape.key, **self._like
            )
        keys, values = self._keys[None, :, begin:end], self._values[None, :, begin:end]
        F.scaled_dot_product_attention(q, keys, values)


def _head_bytes(work: DenseWork) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return how many of each layer's weight bytes are the head's: as many as its share of work."""
    ops = np.maximum(work.token_ops + work.head_ops, 1)
    found: np.ndarray[tuple[int], np.dtype[np.int64]] = work.weight_bytes * work.head_ops // ops
    return found
