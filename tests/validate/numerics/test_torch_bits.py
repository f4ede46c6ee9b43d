"""Bits are unpacked by torch as they are by tables."""

from __future__ import annotations

import pytest
import torch

from moetier.validate.numerics.slices import pack_bits, unpack_bits
from moetier.validate.numerics.torch_bits import unpack_bits_anywhere


@pytest.mark.parametrize("count", [1, 8, 61, 4096])
@pytest.mark.parametrize("bits", range(1, 8))
def test_values_come_back(bits: int, count: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    values = torch.randint(0, 2**bits, (count,), generator=generator, dtype=torch.uint8)
    stream = pack_bits(values, bits)

    found = unpack_bits_anywhere(stream, count, bits)

    assert found.dtype == torch.uint8
    assert found.tolist() == values.tolist() == unpack_bits(stream, count, bits).tolist()
