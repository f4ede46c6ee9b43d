"""This module computes experts from the channels that a policy says matter.

An expert's slices are records, one per channel: gate row, up row and down column, so that what is
not kept is not read, and of an expert in blocks only the blocks that are needed have to be there.
Sketches and recovery maps stay in memory, as the policy counts them; screening reads them in full.
Which channels are kept is the policy's word: on a trace they are drawn, whatever the sketch says.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moetier.sim.policy.precision.channels import Channels
from moetier.traces.channels import row_trit_bytes
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.validate.machines.experts import Levels, Which
from moetier.validate.machines.kernels.channel_code import exact, recovered, screen
from moetier.validate.machines.kernels.code_stream import check_bytes
from moetier.validate.machines.random_weights import Bytes, random_weights
from moetier.validate.machines.slots import require_memory
from moetier.validate.numerics.channels.rotation import rotation

_HALF = np.dtype(np.uint16)  # a bfloat16, by its bits


class ChannelsKernel:
    """Experts in one block of channels, or in several; raises `InputError` without numba."""

    name = "channels"
    dtype = torch.float32

    def __init__(
        self, geometry: Geometry, weights: str, precision: Channels, seed: int = 0
    ) -> None:
        """Make random sketches and maps for every expert of *geometry*, of *seed*.

        Raises:
            InputError: If experts are not bfloat16 or have biases, if a row of the sketch has
                several scales, or the memory does not suffice.
        """
        if weights != "bf16" or geometry.expert_biases or precision.group is not None:
            raise InputError(
                "channels are computed of bf16 experts without biases, one scale per row",
                where="policy.precision",
                way_out="use `weights: bf16` and leave `group` out",
            )
        self._hidden, self._channels = geometry.hidden or 0, geometry.moe_intermediate or 0
        self._n_experts, self._blocks = geometry.n_experts, precision.blocks
        self.levels: Levels = (tuple(range(precision.blocks)),)
        count = geometry.n_moe_layers * geometry.n_experts
        packed, rank = row_trit_bytes(self._hidden, None), precision.rank
        per_expert = self._channels * (2 * packed + 6 + 2 * rank) + 2 * rank * self._hidden
        require_memory(count * per_expert, "sketches")
        generator = np.random.Generator(np.random.SFC64(seed))
        size = (2, count, self._channels, packed)
        self._trits = generator.integers(0, 256, size, dtype=np.uint8)  # any byte is five trits
        # gate and up scales, then norms
        self._scales = self._halves((3, count, self._channels), seed, 1)
        self._left = self._halves((count, rank, self._hidden), seed, 2)
        self._right = self._halves((count, self._channels, rank), seed, 3)
        self._turn = rotation(self._hidden, seed)

    def run(
        self, buffers: Sequence[Tensor | None], x: Tensor, which: Which | None = None
    ) -> Tensor:
        """Return the expert's output from the channels kept, all of them without *which*."""
        which = which or Which(0, 0)
        kept = which.kept
        if kept is None:
            kept = np.ones((len(x), self._channels), np.bool_)
        rows = x.contiguous().numpy()
        guesses, scores = np.empty((2, len(x), self._channels), np.float32)
        at = which.layer * self._n_experts + which.expert
        gate, up, norms = self._scales[:, at]
        screen(
            rows, self._turn.signs.numpy(), self._turn.block, self._trits[0, at],
            self._trits[1, at], gate, up, norms, guesses, scores,
        )  # fmt: skip
        out = np.zeros(rows.shape, np.float32)
        each = self._channels // self._blocks
        for block, buffer in enumerate(buffers):
            wanted = np.ascontiguousarray(kept[:, block * each : (block + 1) * each])
            if not wanted.any():
                continue
            check_bytes(buffer, each * 3 * self._hidden * _HALF.itemsize)
            assert buffer is not None
            records = buffer.numpy().view(_HALF).reshape(each, 3 * self._hidden)
            exact(rows, wanted, records, out)
        if self._left.shape[1]:
            recovered(guesses, kept, self._left[at], self._right[at], out)
        return torch.from_numpy(out)

    def made_up(self, part: int, *seed: int) -> Bytes:
        """Return the bytes of a block; see `Kernel`."""
        each = self._channels // self._blocks
        return random_weights(each * 3 * self._hidden * _HALF.itemsize, "bf16", self._hidden, *seed)

    def _halves(self, shape: tuple[int, ...], *seed: int) -> np.ndarray[tuple[int, ...], _Half]:
        """Return random bfloat16 numbers, as their bits."""
        nbytes = int(np.prod(shape)) * _HALF.itemsize
        drawn = random_weights(nbytes, "bf16", self._hidden, *seed)
        return drawn.view(np.uint16).reshape(shape)


_Half = np.dtype[np.uint16]
