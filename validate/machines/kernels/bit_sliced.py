"""This module computes experts from their MSB slice alone, or from MSB and LSB slice together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moetier.sim.layout import LSB, MSB
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.validate.machines.experts import Levels, Which, gated_mlp
from moetier.validate.machines.kernels.made_up import half_scales
from moetier.validate.machines.random_weights import Bytes
from moetier.validate.numerics.slices import SliceFormat, unpack_weights


class BitSlicedKernel:
    """Experts of two slices, whose bytes `numerics.slices` describes."""

    name = "bit-sliced"
    dtype = torch.float32
    levels: Levels = ((MSB, LSB), (MSB,))

    def __init__(self, geometry: Geometry, bits: tuple[int, int], group: int) -> None:
        """Read slices of *bits*, (all, those of the MSB slice), of the experts of *geometry*.

        Raises:
            InputError: If there are no such slices of them.
        """
        hidden, inner = geometry.hidden or 0, geometry.moe_intermediate or 0
        gated, biased = geometry.expert_matrices == 3, geometry.expert_biases
        self.format = SliceFormat(*bits, group, hidden, inner, gated, biased)

    def run(
        self, buffers: Sequence[Tensor | None], x: Tensor, which: Which | None = None
    ) -> Tensor:
        """Return the expert's output, of low precision without its LSB slice; see `Kernel`."""
        msb, lsb = buffers
        if msb is None:
            raise InputError("an expert without its MSB slice cannot be computed", where="experts")
        up, down, up_bias, down_bias = unpack_weights(self.format, msb, lsb)
        return gated_mlp(x, up, down, self.format.gated, up_bias, down_bias)

    def made_up(self, part: int, *seed: int) -> Bytes:
        """Return the bytes of an MSB or LSB slice; see `Kernel`."""
        how = self.format
        generator = np.random.Generator(np.random.SFC64(np.random.SeedSequence(seed)))
        found = generator.integers(0, 256, how.nbytes[part], dtype=np.uint8)
        if part == LSB:
            return found
        for at, count in how.scales:
            found[at : at + 2 * count] = half_scales(generator, count, how.high, how.hidden)
        for at, count in how.bias_places:
            found[at : at + 2 * count] = 0
        return found
