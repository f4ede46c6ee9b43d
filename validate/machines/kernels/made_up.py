"""This module makes up scales for random codes, such that the weights are of a sane size."""

from __future__ import annotations

from math import log2, sqrt

import numpy as np

from moetier.validate.machines.random_weights import Bytes

_FRACTION = 0x3FF  # of a float16
_BIAS = 15  # of its exponent


def half_scales(generator: np.random.Generator, count: int, bits: int, fan_in: int) -> Bytes:
    """Return the bytes, (2 count,), of positive float16 scales of one exponent, neither 0 nor NaN.

    With uniform codes and zero-points of *bits* bits, a product with *fan_in* inputs of unit
    variance then has a variance of about 1.
    """
    spread = sqrt((4**bits - 1) / 6)  # of the difference of two uniform codes
    # uniform in [1, 2) has a mean square of 7/3
    exponent = _BIAS - round(log2(spread * sqrt(7 / 3 * max(fan_in, 1))))
    fraction = generator.integers(0, _FRACTION + 1, count, dtype=np.uint16)
    halves = fraction | np.uint16(min(max(exponent, 1), 30) << 10)
    found: Bytes = halves.view(np.uint8)
    return found
