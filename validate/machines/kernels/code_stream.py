"""This module stores an expert in codes of one width, and brings it back.

The bytes of the slice, for `up` (the rows of gate, then those of up) and then `down`, all values
one after the other with no padding between them, so that they are those `sim` counts:

| section | values | bits each |
|---------|--------|-----------|
| scales | groups of up, then of down | 16 (float16) |
| codes | up, then down | bits |
| zero-points | groups of up, then of down | bits |

Codes and zero-points are one stream, as `numerics.slices.pack_bits` packs it. Biases are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moetier.traces.errors import InputError
from moetier.traces.formats import check_group
from moetier.traces.geometry import Geometry
from moetier.validate.machines.kernels.made_up import half_scales
from moetier.validate.machines.random_weights import Bytes
from moetier.validate.numerics.groupwise import dequantised
from moetier.validate.numerics.slices import SlicedExpert, pack_bits, unpack_bits

MOST_BITS = 8


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """What one must know to read the slice; *gated* says whether `up` begins with gate's rows."""

    bits: int
    group: int
    hidden: int
    inner: int
    gated: bool

    def __post_init__(self) -> None:
        """Refuse codes of more than a byte, and groups that do not divide a row."""
        if not 1 <= self.bits <= MOST_BITS:
            raise InputError(
                f"codes of {self.bits} bits have no kernel",
                where="policy.precision",
                way_out=f"use 1 to {MOST_BITS} bits, or `full`",
            )
        for _, columns in self.shapes:
            check_group(columns, self.group, "policy.precision.group")

    @classmethod
    def of(cls, geometry: Geometry, bits: int, group: int) -> CodeFormat:
        """Return the format of the experts of *geometry*."""
        hidden, inner = geometry.hidden or 0, geometry.moe_intermediate or 0
        return cls(bits, group, hidden, inner, geometry.expert_matrices == 3)

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the rows and columns of `up` and of `down`."""
        return (self.inner * (1 + self.gated), self.hidden), (self.hidden, self.inner)

    @property
    def groups(self) -> list[int]:
        """Return how many groups `up` and `down` have."""
        return [rows * (columns // self.group) for rows, columns in self.shapes]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the slice."""
        groups = sum(self.groups)
        return 2 * groups + -(-groups * (self.group + 1) * self.bits // 8)

    def pack(self, expert: SlicedExpert) -> Tensor:
        """Return *expert*, whose codes have as many bits, as (nbytes,) uint8."""
        parts = (expert.up, expert.down)
        scales = torch.cat([part.scales.to(torch.float16).flatten() for part in parts])
        values = [part.codes.flatten() for part in parts] + [part.zeros.flatten() for part in parts]
        stream = pack_bits(torch.cat(values).to(torch.uint8), self.bits)
        return torch.cat([scales.view(torch.uint8), stream])

    def weights(self, slice_bytes: Tensor) -> tuple[Tensor, Tensor]:
        """Return `up` and `down`, float32, of the bytes of a slice.

        Raises:
            InputError: If it has another number of bytes.
        """
        check_bytes(slice_bytes, self.nbytes)
        groups = self.groups
        total = sum(groups)
        scales = slice_bytes[: 2 * total].clone().view(torch.float16).float()
        values = unpack_bits(slice_bytes[2 * total :], total * (self.group + 1), self.bits)
        codes = values[: total * self.group].view(total, self.group)
        zeros = values[total * self.group :]
        made = dequantised(codes, scales[:, None], zeros[:, None])
        first, second = self.shapes
        return made[: groups[0]].view(first), made[groups[0] :].view(second)

    def made_up(self, *seed: int) -> Bytes:
        """Return the bytes of a slice of random codes; the same *seed* gives the same."""
        generator = np.random.Generator(np.random.SFC64(np.random.SeedSequence(seed)))
        found = generator.integers(0, 256, self.nbytes, dtype=np.uint8)
        total = sum(self.groups)
        found[: 2 * total] = half_scales(generator, total, self.bits, self.hidden)
        return found


def check_bytes(slice_bytes: Tensor | None, expected: int) -> None:
    """Raise `InputError` unless *slice_bytes* are there and *expected* many."""
    have = 0 if slice_bytes is None else slice_bytes.numel()
    if have != expected:
        raise InputError(
            f"a slice has {have} bytes, its format {expected}",
            where="experts",
            way_out="pack the slices of this model and precision",
        )
