"""This module is the compiled part of the channel kernel: one core, one MoE block.

Sums over trits: the digits (a trit plus one) leave a packed byte by multiplying by 3; they are
summed against 16-bit integer inputs, and the sum of the inputs is taken off. That takes less than
half the time of looking partial sums up in a table of 243 per byte.

Shapes: T tokens, A assignments sorted by expert, U experts used, H hidden, I channels, P packed
bytes of a row, r rank. 16-bit floating-point numbers come as uint16.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from moetier.validate.numerics.channels.compiled import compiled, prefetch, single

# numba gives these their types when it compiles; no checker can follow it.
Array = Any
Number = Any

LEVELS = 16383  # inputs become integers of this size: 2 * LEVELS * H stays below 2**31
LINE = 64  # bytes of a cache line


@compiled
def rotate(x: Array, signs: Array, block: int, out: Array) -> None:
    """Write Q *x*, (H), to *out*; see `rotation`."""
    n = x.shape[0]
    for i in range(n):
        out[i] = x[i] * signs[i]
    half = 1
    while half < block:
        for start in range(0, n, 2 * half):
            for i in range(start, start + half):
                a, b = out[i], out[i + half]
                out[i], out[i + half] = a + b, a - b
        half *= 2
    scale = np.float32(1 / math.sqrt(block))
    for i in range(n):
        out[i] *= scale


@compiled
def integers(x: Array, out: Array) -> tuple[Number, Number]:
    """Write *x*, (H), as integers to *out*, (5, P), in the order of the digits of packed bytes.

    Returns the value of one integer step, and the integers' sum.
    """
    largest = np.float32(0)
    for i in range(x.shape[0]):
        largest = max(largest, abs(x[i]))
    step = largest / np.float32(LEVELS) if largest > 0 else np.float32(1)
    inverse = np.float32(1) / step
    flat = out.reshape(-1)
    flat[x.shape[0] :] = 0
    total = np.int64(0)
    for i in range(x.shape[0]):
        flat[i] = np.int16(np.rint(x[i] * inverse))
        total += np.int64(flat[i])
    return float(step), total


@compiled
def digit_sums(packed: Array, x: Array, out: Array) -> None:
    """Write the sums of digits of rows, (I, P), times inputs, (5, P), to *out*, (I) in int32.

    It is the store to int32 that lets the compiler add in 32 bits and so halves the time; for the
    same reason tokens are not taken in pairs, which was slower than unpacking twice.
    """
    three, low, shift = np.uint16(3), np.uint16(255), np.uint16(8)
    for r in range(packed.shape[0]):
        row = packed[r]
        total = np.int32(0)
        for j in range(row.shape[0]):
            t = np.uint16(np.uint16(row[j]) * three)
            total += np.int32(np.int16(t >> shift)) * np.int32(x[0, j])
            t = np.uint16(np.uint16(t & low) * three)
            total += np.int32(np.int16(t >> shift)) * np.int32(x[1, j])
            t = np.uint16(np.uint16(t & low) * three)
            total += np.int32(np.int16(t >> shift)) * np.int32(x[2, j])
            t = np.uint16(np.uint16(t & low) * three)
            total += np.int32(np.int16(t >> shift)) * np.int32(x[3, j])
            t = np.uint16(np.uint16(t & low) * three)
            total += np.int32(np.int16(t >> shift)) * np.int32(x[4, j])
        out[r] = total


@compiled
def scaled(counts: Array, less: Number, scales: Array, step: Number, out: Array) -> None:
    """Write (*counts* - *less*) times *scales* times *step* to *out*, (I)."""
    for r in range(out.shape[0]):
        out[r] = np.float32(counts[r] - less) * single(scales[r]) * step


@compiled
def gated(kind: int, alpha: Number, limit: Number, gate: Number, up: Number) -> Number:
    """Return what `gating.Gating` makes of two numbers; *kind* counts its kinds."""
    gate = min(gate, limit)
    up = min(max(up, -limit), limit)
    if kind == 0:
        return np.float32(gate / (np.float32(1) + math.exp(-gate)) * up)
    if kind == 1:
        return np.float32(gate * 0.5 * (1 + math.erf(gate * math.sqrt(0.5))) * up)
    if kind == 2:
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate * gate * gate)
        return np.float32(gate * 0.5 * (1 + math.tanh(inner)) * up)
    return np.float32(gate / (np.float32(1) + math.exp(-alpha * gate)) * (up + 1))


@compiled
def mark(scores: Array, k: int, least: Number, out: Array) -> None:
    """Mark in *out*, (I), the best *k* of *scores*, none of them negative.

    With *k* below 0, mark those of at least *least*.
    """
    n = scores.shape[0]
    if k < 0:
        for i in range(n):
            out[i] = scores[i] >= least
        return
    k = min(k, n)
    bits = scores.view(np.int32)  # numbers above 0 are ordered as their bits are
    border = np.int32(0)  # the largest of which at least k are as large
    for place in range(30, -1, -1):
        trial = border | np.int32(1 << place)
        count = 0
        for i in range(n):
            count += bits[i] >= trial
        if count >= k:
            border = trial
    above = 0
    for i in range(n):
        above += bits[i] > border
    equal = k - above
    for i in range(n):
        take = bits[i] == border and equal > 0
        out[i] = bits[i] > border or take
        equal -= take


@compiled
def ask_for(records: Array, channel: int) -> None:
    """Prefetch the weights of *channel* of *records*, (I, 3 H)."""
    row = records[channel]
    for i in range(0, row.shape[0], LINE // row.itemsize):
        prefetch(row, i)


@compiled
def products(record: Array, x: Array) -> tuple[Number, Number]:
    """Return the products of gate and up row of a *record*, (3 H), with *x*, (H)."""
    n = x.shape[0]
    one, two = record[:n], record[n : 2 * n]
    gate = up = np.float32(0)
    for i in range(n):
        gate += single(one[i]) * x[i]
        up += single(two[i]) * x[i]
    return gate, up


@compiled
def add(weights: Array, factor: Number, out: Array) -> None:
    """Add *factor* times *weights* to *out*, both (n)."""
    for i in range(out.shape[0]):
        out[i] += factor * single(weights[i])


@compiled
def block(
    x: Array,  # (T, H) float32
    experts: Array,  # (U) ascending
    bounds: Array,  # (U + 1): assignments of each
    tokens: Array,  # (A)
    shares: Array,  # (A) float32, gate weights
    k: int,
    least: Number,
    union: bool,
    signs: Array,  # (H) float32
    turn: int,  # block of the rotation
    packed: tuple[Array, Array],  # gate and up, each (E, I, P) uint8
    scales: tuple[Array, Array],  # each (E, I)
    norms: Array,  # (E, I)
    maps: tuple[Array, Array],  # U^T (E, r, H) and V (E, I, r)
    records: Array,  # (E, I, 3 H): gate row, up row, down column
    biases: tuple[Array, Array, Array],  # (E, I), (E, I), (E, H) float32, or empty
    gating: tuple[int, Number, Number],  # kind, alpha, limit
    out: Array,  # (T, H) float32, zero
    kept: Array,  # (A, I) bool
) -> None:
    """Add to *out* what the chosen channels and the recovery maps of the routed experts make."""
    n_tokens, hidden = x.shape
    channels, rank = norms.shape[1], maps[0].shape[1]
    inputs = np.empty((n_tokens, 5, packed[0].shape[2]), np.int16)
    sums = np.empty(n_tokens, np.int64)
    steps = np.empty(n_tokens, np.float32)
    counts = np.empty(channels, np.int32)
    rotated = np.empty(hidden, np.float32)
    for t in range(n_tokens):
        rotate(x[t], signs, turn, rotated)
        steps[t], sums[t] = integers(rotated, inputs[t])
    scores = np.empty(channels, np.float32)
    some = np.empty(channels, np.bool_)
    order = np.empty(channels, np.int64)
    biased = biases[0].size > 0
    for u in range(experts.shape[0]):
        e, first, last = experts[u], bounds[u], bounds[u + 1]
        n = last - first
        who = tokens[first:last]
        gate = np.empty((n, channels), np.float32)
        up = np.empty((n, channels), np.float32)
        some[:] = False
        for t in range(n):
            w = who[t]
            digit_sums(packed[0][e], inputs[w], counts)
            scaled(counts, sums[w], scales[0][e], steps[w], gate[t])
            digit_sums(packed[1][e], inputs[w], counts)
            scaled(counts, sums[w], scales[1][e], steps[w], up[t])
            for c in range(channels):
                g, v = gate[t, c], up[t, c]
                if biased:
                    g += biases[0][e, c]
                    v += biases[1][e, c]
                gate[t, c] = gated(*gating, g, v)  # from here on, the estimated activation
                scores[c] = abs(gate[t, c] * shares[first + t]) * single(norms[e, c])
            mark(scores, k, least, kept[first + t])
            some |= kept[first + t]
        if union:
            for t in range(n):
                kept[first + t] = some
        count = 0
        for c in range(channels):
            if some[c]:
                order[count] = c
                count += 1
        weights = records[e]
        if count:
            ask_for(weights, order[0])
        for i in range(count):
            c = order[i]
            if i + 1 < count:
                ask_for(weights, order[i + 1])
            record = weights[c]
            for t in range(n):
                if kept[first + t, c]:
                    g, v = products(record, x[who[t]])
                    if biased:
                        g += biases[0][e, c]
                        v += biases[1][e, c]
                    act = np.float32(gated(*gating, g, v) * shares[first + t])
                    add(record[2 * hidden :], act, out[who[t]])
        for t in range(n):
            if rank:
                small = np.zeros(rank, np.float32)
                for c in range(channels):
                    if not kept[first + t, c]:
                        add(maps[1][e, c], gate[t, c], small)
                for q in range(rank):
                    add(maps[0][e, q], small[q] * shares[first + t], out[who[t]])
            if biased:
                add(biases[2][e], shares[first + t], out[who[t]])


@compiled
def dense_block(
    x: Array,  # (T, H) float32
    experts: Array,  # (U) ascending
    bounds: Array,  # (U + 1)
    tokens: Array,  # (A)
    shares: Array,  # (A) float32
    records: Array,  # (E, I, 3 H)
    gating: tuple[int, Number, Number],
    out: Array,  # (T, H) float32, zero
) -> None:
    """Add to *out* what all channels of the routed experts make; for comparison, without biases."""
    hidden = x.shape[1]
    for u in range(experts.shape[0]):
        weights = records[experts[u]]
        for c in range(weights.shape[0]):
            record = weights[c]
            for a in range(bounds[u], bounds[u + 1]):
                gate, up = products(record, x[tokens[a]])
                act = np.float32(gated(*gating, gate, up) * shares[a])
                add(record[2 * hidden :], act, out[tokens[a]])
