"""This module computes experts that are stored in codes: it dequantises, then multiplies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moetier.traces.geometry import Geometry
from moetier.validate.machines.experts import Levels, Which, gated_mlp
from moetier.validate.machines.kernels.code_stream import CodeFormat, check_bytes
from moetier.validate.machines.random_weights import Bytes


class CodesKernel:
    """Experts of one slice in codes of *bits* bits, in groups of *group*."""

    name = "codes"
    dtype = torch.float32
    levels: Levels = ((0,),)

    def __init__(self, geometry: Geometry, bits: int, group: int) -> None:
        """Read slices of the experts of *geometry*.

        Raises:
            InputError: If there is no kernel for such codes.
        """
        self.format = CodeFormat.of(geometry, bits, group)

    def run(
        self, buffers: Sequence[Tensor | None], x: Tensor, which: Which | None = None
    ) -> Tensor:
        """Return the expert's output; see `Kernel`."""
        (buffer,) = buffers
        check_bytes(buffer, self.format.nbytes)
        assert buffer is not None
        up, down = self.format.weights(buffer)
        return gated_mlp(x, up, down, self.format.gated)

    def made_up(self, part: int, *seed: int) -> Bytes:
        """Return the bytes of a slice; see `Kernel`."""
        return self.format.made_up(*seed)
