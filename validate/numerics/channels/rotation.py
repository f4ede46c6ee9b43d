"""This module rotates hidden states and weights by a randomised Hadamard transform.

Q = H D / sqrt(b): signs D drawn from a seed, then Hadamard matrices H of b x b on blocks of b
inputs, where b is the largest power of two that divides their number. Q is orthogonal, so
W x = (W Q^T) (Q x), and it spreads outliers over a block, which is what a ternary code needs. A
size that is no power of two gets smaller blocks (2880: 45 blocks of 64) rather than padding, which
would cost bytes (4096 trits for 2880); an odd size gets signs alone.

Shapes: H hidden, b block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moetier.traces.errors import InputError


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The orthogonal matrix Q of a size and a seed; *signs* is (H), of +1 and -1 in float32."""

    signs: Tensor

    @property
    def block(self) -> int:
        """Return the width of a Hadamard block: the largest power of two that divides H."""
        return len(self.signs) & -len(self.signs)

    def apply(self, x: Tensor) -> Tensor:
        """Return Q x for every row of *x*, (..., H), in float32; H log2(b) additions a row."""
        b = self.block
        y = (x.float() * self.signs).reshape(-1, b)
        half = 1
        while half < b:
            pair = y.view(-1, b // (2 * half), 2, half)
            y = torch.stack((pair[:, :, 0] + pair[:, :, 1], pair[:, :, 0] - pair[:, :, 1]), 2)
            half *= 2
        return y.reshape(x.shape) / math.sqrt(b)


def rotation(hidden: int, seed: int) -> Rotation:
    """Return the rotation of *hidden* inputs that *seed* draws."""
    if hidden < 1:
        raise InputError(f"cannot rotate {hidden} inputs")
    rng = torch.Generator().manual_seed(seed)
    return Rotation(torch.randint(0, 2, (hidden,), generator=rng).float() * 2 - 1)
