"""This module makes weights up: bytes that are valid numbers of the right size, fast and seeded.

Time and bytes do not depend on what the numbers are, as long as they are finite and not denormal.
"""

from __future__ import annotations

from math import log2, sqrt

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

TORCH_DTYPES = {"bf16": "bfloat16", "f32": "float32"}
"""Weight formats in which a matrix is a plain array -> the name of torch's type."""

_SIGN_AND_FRACTION = {"bf16": 0x807F_807F_807F_807F, "f32": 0x807F_FFFF_807F_FFFF}
_EXPONENT = {"bf16": 0x0080_0080_0080_0080, "f32": 0x0080_0000_0080_0000}


def random_weights(nbytes: int, kind: str, fan_in: int, *seed: int) -> Bytes:
    """Return (nbytes,) bytes of numbers stored as *kind*; the same *seed* gives the same.

    In bf16 and f32 they are of random sign and fraction and of one exponent, such that a product
    with *fan_in* inputs of unit variance has about unit variance. Other formats get random bytes,
    which whoever reads them must be able to take.
    """
    generator = np.random.Generator(np.random.SFC64(np.random.SeedSequence(seed)))
    words = generator.integers(0, 1 << 64, -(-nbytes // 8), dtype=np.uint64)
    if kind in _EXPONENT:
        # uniform in [1, 2) has a mean square of 7/3
        exponent = 127 - round(log2(sqrt(7 / 3 * max(fan_in, 1))))
        words &= np.uint64(_SIGN_AND_FRACTION[kind])
        words |= np.uint64(_EXPONENT[kind] * exponent)
    return words.view(np.uint8)[:nbytes]
