"""This module is the compiled part of the channels kernel, for channels that were chosen elsewhere.

It is made of the pieces of `numerics.channels.kernel_code`.

Shapes: t tokens, H hidden, I channels, P packed bytes of a row, n channels of a block, r rank.
16-bit floating-point numbers come as uint16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moetier.validate.numerics.channels.compiled import compiled, single
from moetier.validate.numerics.channels.kernel_code import (
    add,
    digit_sums,
    gated,
    integers,
    products,
    rotate,
    scaled,
)

Array = Any  # numba gives these their types when it compiles

SILU = (0, 1.0, np.inf)  # kind, alpha and limit, as `gated` takes them


@compiled
def screen(
    x: Array,  # (t, H) float32
    signs: Array,  # (H) float32
    turn: int,  # block of the rotation
    gate: Array,  # (I, P) uint8
    up: Array,
    gate_scales: Array,  # (I)
    up_scales: Array,
    norms: Array,  # (I)
    out: Array,  # (t, I) float32
    scores: Array,  # (t, I) float32
) -> None:
    """Write estimated activations to *out*, and what a channel scores to *scores*."""
    channels = gate.shape[0]
    inputs = np.empty((5, gate.shape[1]), np.int16)
    rotated = np.empty(x.shape[1], np.float32)
    counts = np.empty(channels, np.int32)
    first = np.empty(channels, np.float32)
    second = np.empty(channels, np.float32)
    for t in range(x.shape[0]):
        rotate(x[t], signs, turn, rotated)
        step, total = integers(rotated, inputs)
        digit_sums(gate, inputs, counts)
        scaled(counts, total, gate_scales, np.float32(step), first)
        digit_sums(up, inputs, counts)
        scaled(counts, total, up_scales, np.float32(step), second)
        for c in range(channels):
            out[t, c] = gated(*SILU, first[c], second[c])
            scores[t, c] = abs(out[t, c]) * single(norms[c])


@compiled
def exact(
    x: Array,  # (t, H) float32
    kept: Array,  # (t, n) bool
    records: Array,  # (n, 3 H): gate row, up row, down column
    out: Array,  # (t, H) float32
) -> None:
    """Add what the *kept* channels of a block make to *out*; other records are not read."""
    hidden = x.shape[1]
    for c in range(records.shape[0]):
        record = records[c]
        for t in range(x.shape[0]):
            if kept[t, c]:
                gate, up = products(record, x[t])
                add(record[2 * hidden :], gated(*SILU, gate, up), out[t])


@compiled
def recovered(
    guesses: Array,  # (t, I) float32
    kept: Array,  # (t, I) bool
    left: Array,  # (r, H)
    right: Array,  # (I, r)
    out: Array,  # (t, H) float32
) -> None:
    """Add what the recovery maps make of the channels that are not *kept* to *out*."""
    for t in range(guesses.shape[0]):
        small = np.zeros(left.shape[0], np.float32)
        for c in range(guesses.shape[1]):
            if not kept[t, c]:
                add(right[c], guesses[t, c], small)
        for q in range(left.shape[0]):
            add(left[q], small[q], out[t])
