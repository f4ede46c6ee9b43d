"""This module computes experts that are stored twice: a copy at high precision, and a low one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moetier.sim.policy.precision.hobbit import HIGH, LOW
from moetier.traces.errors import InputError
from moetier.validate.machines.experts import Kernel, Levels, Which
from moetier.validate.machines.random_weights import Bytes


class CopiesKernel:
    """Experts of two slices, of which a batch uses one; each has a kernel of its own."""

    name = "hobbit"
    levels: Levels = ((HIGH,), (LOW,))

    def __init__(self, high: Kernel, low: Kernel) -> None:
        """Compute the first copy with *high*, the second with *low*."""
        self._kernels = (high, low)
        self.dtype: torch.dtype = high.dtype

    def run(
        self, buffers: Sequence[Tensor | None], x: Tensor, which: Which | None = None
    ) -> Tensor:
        """Return the expert's output, from the one copy that is there; see `Kernel`."""
        there = [at for at, buffer in enumerate(buffers) if buffer is not None]
        if len(there) != 1:
            raise InputError(
                f"{len(there)} copies of an expert, and one is needed", where="experts"
            )
        kernel = self._kernels[there[0]]
        return kernel.run([buffers[there[0]]], x.to(kernel.dtype), which).to(self.dtype)

    def made_up(self, part: int, *seed: int) -> Bytes:
        """Return the bytes of a copy; see `Kernel`."""
        return self._kernels[part].made_up(0, *seed)
