"""This module unpacks streams of bits with torch alone, where the bytes are not on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def unpack_bits_anywhere(stream: Tensor, count: int, bits: int) -> Tensor:
    """Return the *count* values of *bits* bits in *stream*, uint8, on its device.

    They are those of `slices.unpack_bits`: eight values take *bits* whole bytes, lowest bits first.
    """
    device = stream.device
    if bits in (1, 2, 4):
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=device)
        values: Tensor = stream[:, None] >> shifts & (2**bits - 1)
        return values.flatten()[:count]
    n_words = -(-count // 8)
    padded = torch.zeros(n_words * bits, dtype=torch.uint8, device=device)
    padded[: len(stream)] = stream
    places = 8 * torch.arange(bits, device=device)
    words = (padded.view(-1, bits).long() << places).sum(1)
    shifts = bits * torch.arange(8, device=device)
    eights: Tensor = words[:, None] >> shifts & (2**bits - 1)
    return eights.to(torch.uint8).flatten()[:count]
