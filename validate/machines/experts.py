"""This module computes experts from the buffers their slices were read into.

Shapes: T tokens of a batch, t of them routed to an expert, H hidden, I expert intermediate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from moetier.sim.units import format_bytes
from moetier.traces.batch import LayerBatch
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.validate.machines.random_weights import TORCH_DTYPES
from moetier.validate.machines.slots import Slot


class Kernel(Protocol):
    """Computes one expert; one kernel per way of storing experts in slices."""

    name: str
    dtype: torch.dtype  # of the hidden states it takes and gives

    def run(self, buffers: Sequence[Tensor | None], x: Tensor) -> Tensor:
        """Return the expert's output (t, H) for *x* (t, H).

        *buffers* has the bytes (uint8) of each of the expert's slices, by part; None for a part
        that compute does without. They must not be kept: the memory is used again.
        """
        ...


class WholeKernel:
    """Experts that are one slice: gate, up and down after each other, as plain matrices."""

    name = "whole"

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
        self.nbytes = geometry.expert_weights * self.dtype.itemsize
        self._gated = geometry.expert_matrices == 3
        hidden, inner = geometry.hidden or 0, geometry.moe_intermediate or 0
        self._down = (hidden, inner)
        self._up = ((geometry.expert_matrices - 1) * inner, hidden)  # gate and up in one product

    def run(self, buffers: Sequence[Tensor | None], x: Tensor) -> Tensor:
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
        up = F.linear(x, weights[: rows * columns].view(rows, columns))
        if self._gated:
            gate, up = up.chunk(2, dim=-1)
            inner = F.silu(gate) * up
        else:
            inner = F.silu(up)
        return F.linear(inner, weights[rows * columns :].view(self._down))


class Routed(NamedTuple):
    """The tokens of one expert."""

    tokens: Tensor  # (t,) int64
    weights: Tensor  # (t, 1) gate weights


class Experts:
    """The experts of a batch, one at a time, and their sum."""

    def __init__(self, kernel: Kernel) -> None:
        """Compute each with *kernel*."""
        self.kernel = kernel

    def routed(self, batch: LayerBatch, experts: Iterable[int]) -> dict[int, Routed]:
        """Return the tokens of each of *experts*; without gate weights all of a token's are equal.

        A token that an expert is listed for twice counts twice.
        """
        each = batch.n_tokens / max(len(batch.experts), 1)
        found: dict[int, tuple[list[int], list[float]]] = {e: ([], []) for e in experts}
        entries = zip(batch.experts, batch.token_ids(), strict=True)
        for at, (expert, token) in enumerate(entries):
            if expert in found:
                tokens, weights = found[expert]
                tokens.append(token)
                weights.append(each if batch.weights is None else float(batch.weights[at]))
        dtype = self.kernel.dtype
        return {
            e: Routed(torch.tensor(tokens), torch.tensor(weights, dtype=dtype)[:, None])
            for e, (tokens, weights) in found.items()
        }

    def run(self, slots: Sequence[Slot | None], routed: Routed, x: Tensor) -> Tensor:
        """Return one expert's part of the output, (t, H), for the hidden states *x* (T, H)."""
        with torch.inference_mode():
            mine = x if len(x) == 1 == len(routed.tokens) else x[routed.tokens]
            return self.kernel.run([as_tensor(slot) for slot in slots], mine) * routed.weights

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
    return torch.frombuffer(slot.memory, dtype=torch.uint8, count=slot.nbytes)


class RandomHidden:
    """Hidden states of a batch: random, of unit variance, and the same every time."""

    def __init__(self, hidden: int, dtype: torch.dtype, seed: int = 0) -> None:
        """Make states of *hidden* numbers."""
        self._hidden, self._dtype, self._seed = hidden, dtype, seed
        self._made: dict[int, Tensor] = {}

    def __call__(self, batch: LayerBatch) -> Tensor:
        """Return (T, H)."""
        n = batch.n_tokens
        if n not in self._made:
            generator = torch.Generator().manual_seed(self._seed)
            drawn = torch.randn(n, self._hidden, generator=generator)
            self._made[n] = drawn.to(self._dtype)
        return self._made[n]
