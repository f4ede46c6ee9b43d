"""This module quantises weights group by group, and nests a low precision inside a high one.

A group is a run of weights along the input dimension (the last one) that share a scale s and an
integer zero-point z: w is about s * (q - z), with codes q of a given number of bits. Dropping the
lowest d bits of codes and zero-points, and doubling s d times, gives a coarser version of the same
tensor that needs no memory of its own: its codes are the high bits of the fine ones.

Shapes: (..., I) weights, (..., G, group) codes, (..., G, 1) scales and zero-points, I = G * group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32


@dataclass(frozen=True, slots=True)
class Quantised:
    """A tensor in codes of *bits* bits; see the module for the shapes."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int

    def weights(self) -> Tensor:
        """Return the weights that the codes stand for, (..., I), in the scales' type."""
        return ((self.codes - self.zeros) * self.scales).flatten(-2)

    def nested(self, bits: int) -> Quantised:
        """Return the version made of the *bits* highest bits of every code."""
        _check_bits(bits, self.bits)
        drop = self.bits - bits
        return Quantised(self.codes >> drop, self.scales * 2**drop, self.zeros >> drop, bits)


def quantise(
    weights: Tensor, bits: int, group: int = GROUP, *, half_scales: bool = False
) -> Quantised:
    """Quantise floating-point *weights*, (..., I), asymmetrically to codes of 1 to 8 *bits*.

    A group's range always takes in 0, so that 0 has a code of its own and the zero-point fits into
    *bits*. With *half_scales*, scales are rounded up to what float16 can hold, before the codes are
    made: 16 bits then store them, and no weight falls outside its group's range.

    Raises:
        ValueError: If *bits* is out of range, I is not a multiple of *group*, or a scale is more
            than float16 can hold.
    """
    _check_bits(bits, 8)
    if weights.shape[-1] % group:
        raise ValueError(
            f"an input dimension of {weights.shape[-1]} has no whole number of groups of {group}; "
            "choose a group size that divides it"
        )
    groups = weights.reshape(*weights.shape[:-1], -1, group)
    low = groups.amin(-1, keepdim=True).clamp(max=0)
    high = groups.amax(-1, keepdim=True).clamp(min=0)
    top = 2**bits - 1
    scales = (high - low) / top
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)  # an all-zero group
    if half_scales:
        scales = half_above(scales)
    zeros = torch.round(-low / scales).clamp(0, top).to(torch.int32)
    codes = (torch.round(groups / scales).to(torch.int32) + zeros).clamp(0, top)
    return Quantised(codes, scales, zeros, bits)


def dequantised(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Return what `Quantised.weights` does, of *codes* and *zeros* in uint8, without flattening.

    Differences of codes are exact in float32, so the weights are the same bit by bit; and nothing
    is widened to 32-bit integers on the way.
    """
    return codes.to(torch.float32).sub_(zeros).mul_(scales)


def half_above(values: Tensor) -> Tensor:
    """Return the smallest float16 that is at least each of the positive *values*, in their type.

    Raises:
        ValueError: If one is more than float16 can hold.
    """
    half = values.to(torch.float16)
    short = half.to(values.dtype) < values
    half = (half.view(torch.int16) + short).view(torch.float16)  # the next one up
    if torch.isinf(half).any():
        raise ValueError(f"a scale of {values.max():g} does not fit into 16 bits")
    return half.to(values.dtype)


def requantised(weights: Tensor, bits: int, nested: int | None = None) -> Tensor:
    """Return *weights* as they come back from *bits* bits, or from the *nested* highest of them."""
    fine = quantise(weights, bits)
    return (fine if nested is None else fine.nested(nested)).weights()


def _check_bits(bits: int, most: int) -> None:
    if not 1 <= bits <= most:
        raise ValueError(f"{bits} bits are out of range; choose 1 to {most}")
