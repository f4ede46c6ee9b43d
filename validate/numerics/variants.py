"""This module makes the low-bit versions of a weight that nested quantisation is compared with.

A variant takes weights, (..., I), and returns what they become, in their type, (..., I). All have
16-bit scales per group, so that each is what some store of the same size could hold. With codes q,
zero-point z and scale s of *high* bits, and d = *high* - *low*:

| variant | weight | |
|---------|--------|-|
| high | s (q - z) | all bits |
| nested | s 2^d ((q >> d) - (z >> d)) | AMAT (SliceMoE, arXiv:2512.12990): the MSB slice |
| independent | s (q - z) | quantised at *low* bits outright: nothing shared with *high* |
| symmetric | s 2^d (q >> d) | signed codes without a zero-point, cut |
| zero_untouched | s 2^d ((q >> d) - z) | codes cut, zero-point left as it is |
| zero_exact | s (2^d (q >> d) - z) | codes cut, zero-point kept in the high codes' units |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from moetier.validate.numerics.groupwise import GROUP, Quantised, half_above, quantise

Variant = Callable[[Tensor, int, int, int], Tensor]
"""Takes weights, high bits, low bits and the group's size."""


def high_bits(weights: Tensor, high: int, low: int, group: int = GROUP) -> Tensor:
    """Return *weights* from all *high* bits: MSB and LSB slice together."""
    return _fine(weights, high, group).weights()


def nested(weights: Tensor, high: int, low: int, group: int = GROUP) -> Tensor:
    """Return *weights* from the *low* highest bits of codes and zero-points: the MSB slice."""
    return _fine(weights, high, group).nested(low).weights()


def independent(weights: Tensor, high: int, low: int, group: int = GROUP) -> Tensor:
    """Return *weights* quantised to *low* bits, whatever *high* is."""
    return _fine(weights, low, group).weights()


def symmetric(weights: Tensor, high: int, low: int, group: int = GROUP) -> Tensor:
    """Return *weights* from symmetric codes of *high* bits of which the *low* highest are kept.

    Codes are in two's complement, -2^(high-1) + 1 to 2^(high-1) - 1, and are cut as such: to the
    next lower one.
    """
    groups = weights.reshape(*weights.shape[:-1], -1, group)
    top = max(2 ** (high - 1) - 1, 1)
    scales = groups.abs().amax(-1, keepdim=True) / top
    scales = half_above(torch.where(scales == 0, torch.ones_like(scales), scales))
    codes = torch.round(groups / scales).clamp(-top, top).to(torch.int32)
    drop = high - low
    return Quantised(codes >> drop, scales * 2**drop, torch.zeros_like(codes), low).weights()


def zero_untouched(weights: Tensor, high: int, low: int, group: int = GROUP) -> Tensor:
    """Return *weights* from cut codes, with the zero-point of the codes before they were cut."""
    fine = _fine(weights, high, group)
    cut = fine.nested(low)
    return Quantised(cut.codes, cut.scales, fine.zeros, low).weights()


def zero_exact(weights: Tensor, high: int, low: int, group: int = GROUP) -> Tensor:
    """Return *weights* from cut codes, minus what the zero-point stood for before: all its bits."""
    fine = _fine(weights, high, group)
    codes = fine.codes >> (high - low) << (high - low)
    return Quantised(codes, fine.scales, fine.zeros, high).weights()


VARIANTS: Mapping[str, Variant] = {
    "high": high_bits,
    "nested": nested,
    "independent": independent,
    "symmetric": symmetric,
    "zero untouched": zero_untouched,
    "zero exact": zero_exact,
}
"""By the names that tables show."""


def _fine(weights: Tensor, bits: int, group: int) -> Quantised:
    return quantise(weights, bits, group, half_scales=True)
