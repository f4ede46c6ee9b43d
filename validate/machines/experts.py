"""This module computes experts from the buffers their slices were read into.

Shapes: T tokens of a batch, t of them routed to an expert, H hidden, I expert intermediate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from moetier.sim.policy.base import Precision
from moetier.sim.units import format_bytes
from moetier.traces.batch import Bools, LayerBatch
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.validate.machines.random_weights import TORCH_DTYPES, Bytes, random_weights
from moetier.validate.machines.slots import Slot

CPU = torch.device("cpu")

Levels = tuple[tuple[int, ...], ...]
"""By level of a policy's precision: the parts of an expert that it reads."""


class Kernel(Protocol):
    """Computes one expert; one kernel per way of storing experts in slices."""

    name: str
    dtype: torch.dtype  # of the hidden states it takes and gives
    levels: Levels  # the parts of an expert that each level of a policy reads

    def run(
        self, buffers: Sequence[Tensor | None], x: Tensor, which: Which | None = None
    ) -> Tensor:
        """Return the expert's output (t, H) for *x* (t, H).

        *buffers* has the bytes (uint8) of each of the expert's slices, by part; None for a part
        that compute does without. They must not be kept: the memory is used again. *which* says
        whose slices they are, for kernels that keep something beside them.
        """
        ...

    def made_up(self, part: int, *seed: int) -> Bytes:
        """Return the bytes of a slice, the *part* of an expert: random, finite, in the true layout.

        The same *seed* gives the same.
        """
        ...


class WholeKernel:
    """Experts that are one slice: gate, up and down after each other, as plain matrices."""

    name = "whole"
    levels: Levels = ((0,),)

    def __init__(self, geometry: Geometry, weights: str) -> None:
        """Take the format *weights*.

        Raises:
            InputError: If the geometry lacks a size, or torch has no type for the format.
        """
        if weights not in TORCH_DTYPES:
            raise InputError(
                f"experts stored as {weights} need a kernel of their own",
                where="weights",
                way_out=f"whole experts can be {', '.join(TORCH_DTYPES)}",
            )
        self.dtype: torch.dtype = getattr(torch, TORCH_DTYPES[weights])
        self._weights = weights
        self.nbytes = geometry.expert_weights * self.dtype.itemsize
        self._gated = geometry.expert_matrices == 3
        hidden, inner = geometry.hidden or 0, geometry.moe_intermediate or 0
        self._down = (hidden, inner)
        self._up = ((geometry.expert_matrices - 1) * inner, hidden)  # gate and up in one product

    def run(
        self, buffers: Sequence[Tensor | None], x: Tensor, which: Which | None = None
    ) -> Tensor:
        """Return `down @ (silu(gate @ x) * (up @ x))`, or without a gate `down @ silu(up @ x)`."""
        (buffer,) = buffers
        if buffer is None or buffer.numel() != self.nbytes:
            have = 0 if buffer is None else buffer.numel()
            raise InputError(
                f"an expert's slice has {format_bytes(have)}, its matrices "
                f"{format_bytes(self.nbytes)}",
                where="experts",
                way_out="store the matrices alone, without biases or scales",
            )
        weights = buffer.view(self.dtype)
        rows, columns = self._up
        up = weights[: rows * columns].view(rows, columns)
        return gated_mlp(x, up, weights[rows * columns :].view(self._down), self._gated)

    def made_up(self, part: int, *seed: int) -> Bytes:
        """Return the bytes of an expert; see `Kernel`."""
        return random_weights(self.nbytes, self._weights, self._down[0], *seed)


def gated_mlp(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    gated: bool,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Return `down @ (silu(gate @ x) * (up @ x))`, or without a gate `down @ silu(up @ x)`.

    *up* has the rows of gate first, where there is one, and so has its bias.
    """
    inner = F.linear(x, up, up_bias)
    if gated:
        gate, straight = inner.chunk(2, dim=-1)
        inner = F.silu(gate) * straight
    else:
        inner = F.silu(inner)
    return F.linear(inner, down, down_bias)


class Which(NamedTuple):
    """Which expert it is, and which of its channels are wanted."""

    layer: int
    expert: int
    kept: Bools | None = None  # (t, channels): what each token keeps; None: every channel


class Routed(NamedTuple):
    """The tokens of one expert."""

    tokens: Tensor  # (t,) int64
    weights: Tensor  # (t, 1) gate weights
    which: Which
    levels: list[int] | None = None  # (t,); None: the first for all


class Experts:
    """The experts of a batch, one at a time, and their sum."""

    def __init__(
        self, kernel: Kernel, precision: Precision | None = None, device: torch.device = CPU
    ) -> None:
        """Compute each with *kernel* on *device*, as the *precision* of the running policy says.

        Without one every token is computed at the first level, with every channel.
        """
        self.kernel, self._precision, self._device = kernel, precision, device

    def routed(
        self, batch: LayerBatch, experts: Iterable[int], degraded: Collection[int] = ()
    ) -> dict[int, Routed]:
        """Return the tokens of each of *experts*; without gate weights all of a token's are equal.

        A token that an expert is listed for twice counts twice. Compute does without the slices
        *degraded*.
        """
        each = batch.n_tokens / max(len(batch.experts), 1)
        entries: dict[int, list[int]] = {e: [] for e in experts}
        for at, expert in enumerate(batch.experts):
            if expert in entries:
                entries[expert].append(at)
        levels = kept = None
        if self._precision is not None:
            levels = self._precision.levels(batch, degraded)
            kept = self._precision.channels(batch)
        token_ids, dtype = batch.token_ids(), self.kernel.dtype
        everywhere = [at for places in entries.values() for at in places]
        shares = [each] * len(everywhere) if batch.weights is None else batch.weights[everywhere]
        # in one piece to the device, as a small copy costs as much as a large one
        tokens = torch.tensor([token_ids[at] for at in everywhere]).to(self._device)
        weights = torch.as_tensor(shares, dtype=dtype)[:, None].to(self._device)
        found, begin = {}, 0
        for e, places in entries.items():
            end = begin + len(places)
            found[e] = Routed(
                tokens[begin:end],
                weights[begin:end],
                Which(batch.layer, e, None if kept is None else kept[places]),
                None if levels is None else [levels[at] for at in places],
            )
            begin = end
        return found

    def run(self, slots: Sequence[Slot | None], routed: Routed, x: Tensor) -> Tensor:
        """Return one expert's part of the output, (t, H), for the hidden states *x* (T, H)."""
        with torch.inference_mode():
            mine = x if len(x) == 1 == len(routed.tokens) else x[routed.tokens]
            buffers = [as_tensor(slot) for slot in slots]
            if routed.levels is None:
                return self.kernel.run(buffers, mine, routed.which) * routed.weights
            made = torch.empty_like(mine)
            for level in sorted(set(routed.levels)):
                parts = self.kernel.levels[level]
                there = [b if part in parts else None for part, b in enumerate(buffers)]
                at = torch.tensor([n for n, own in enumerate(routed.levels) if own == level])
                at = at.to(self._device)
                made[at] = self.kernel.run(there, mine[at], routed.which)
            return made * routed.weights

    def add_up(
        self, outputs: Mapping[int, Tensor], routed: Mapping[int, Routed], x: Tensor
    ) -> Tensor:
        """Return the sum of *outputs*, (T, H), in ascending order of experts.

        The order is fixed so that the last bits do not depend on which slice came first.
        """
        total = torch.zeros_like(x)
        with torch.inference_mode():
            for expert in sorted(outputs):
                total.index_add_(0, routed[expert].tokens, outputs[expert])
        return total


def as_tensor(slot: Slot | None) -> Tensor | None:
    """Return the bytes of *slot* as (nbytes,) uint8, without copying; None for None."""
    if slot is None:
        return None
    if isinstance(slot.memory, Tensor):
        return slot.memory[: slot.nbytes]
    return torch.frombuffer(slot.memory, dtype=torch.uint8, count=slot.nbytes)


class RandomHidden:
    """Hidden states of a batch: random, of unit variance, and the same every time."""

    def __init__(
        self, hidden: int, dtype: torch.dtype, seed: int = 0, device: torch.device = CPU
    ) -> None:
        """Make states of *hidden* numbers on *device*."""
        self._hidden, self._dtype, self._seed, self._device = hidden, dtype, seed, device
        self._made: dict[int, Tensor] = {}

    def __call__(self, batch: LayerBatch) -> Tensor:
        """Return (T, H)."""
        n = batch.n_tokens
        if n not in self._made:
            generator = torch.Generator().manual_seed(self._seed)
            drawn = torch.randn(n, self._hidden, generator=generator)
            self._made[n] = drawn.to(self._device, self._dtype)
        return self._made[n]
