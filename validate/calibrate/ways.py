"""This module lists the ways in which a policy's precision has experts computed, ready to be timed.

A way is a kernel with a choice of slices: an expert in bit slices is computed from its MSB slice
alone, or from both. Each has a row of its own in a profile, by the kernel's name and its bytes.
Channels are all there, and what is chosen is how many of them are kept: the bytes are those read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import cycle

import numpy as np
import torch

from moetier.sim.policy.base import Precision
from moetier.sim.policy.precision.channels import Channels
from moetier.traces.batch import Bools, LayerBatch
from moetier.traces.channels import channel_cost
from moetier.traces.geometry import Geometry
from moetier.validate.machines.direct import page_memory
from moetier.validate.machines.experts import CPU, Experts, Kernel, WholeKernel
from moetier.validate.machines.kernels.of_policy import kernel_of
from moetier.validate.machines.random_weights import Bytes
from moetier.validate.machines.slots import Slot

UNCACHED = 1 << 28  # bytes of different experts in turn, more than caches hold
SMALL = 1 << 20  # below, fewer experts than that
MOST = 64  # different experts

SEPARATOR = "@"  # between a kernel's name and the bytes of its experts


@dataclass(frozen=True)
class Way:
    """One way to compute an expert; *slots* are those of different experts, again and again."""

    nbytes: int
    experts: Experts
    slots: Iterator[Sequence[Slot | None]]
    ids: Iterator[int]  # of different experts, for what a kernel keeps beside slots


@dataclass(frozen=True)
class Place:
    """Where experts are computed, and what puts the bytes of a slice there."""

    device: torch.device
    put: Callable[[Bytes], Slot]


def whole(kernel: WholeKernel, place: Place | None = None) -> dict[str, Way]:
    """Return whole experts at *place*, by default in memory."""
    return _named(Precision.kernel, kernel, [(0,)], 1, place or MEMORY)


def ways(
    precision: Precision, geometry: Geometry, weights: str, place: Place | None = None
) -> dict[str, Way]:
    """Return the ways of *precision* by name, at *place*, by default in memory.

    Channels are always in memory.

    Raises:
        InputError: If no kernel computes it.
    """
    if isinstance(precision, Channels):
        return _channels(precision, geometry, weights)
    kernel = kernel_of(precision, geometry, weights)
    parts = max(part for level in kernel.levels for part in level) + 1
    return _named(precision.kernel, kernel, list(kernel.levels), parts, place or MEMORY)


def kernel_name(way: str) -> str:
    """Return the kernel of the way that is called *way*."""
    return way.partition(SEPARATOR)[0]


def _named(
    name: str, kernel: Kernel, levels: Sequence[Sequence[int]], parts: int, place: Place
) -> dict[str, Way]:
    found = {}
    for level in levels:
        slots, nbytes = _different(kernel, level, parts, place)
        way = Way(nbytes, Experts(kernel, device=place.device), cycle(slots), cycle(range(MOST)))
        found[f"{name}{SEPARATOR}{nbytes}"] = way
    return found


def _different(
    kernel: Kernel, level: Sequence[int], parts: int, place: Place
) -> tuple[list[list[Slot | None]], int]:
    """Return the slots of different experts, with the slices of *level*, and the bytes of one."""
    made = {part: kernel.made_up(part, 0) for part in level}
    nbytes = sum(len(data) for data in made.values())
    count = max(-(-UNCACHED // nbytes), 2) if nbytes > SMALL else MOST
    slots = [
        [place.put(made[part]) if part in made else None for part in range(parts)]
        for _ in range(count)
    ]
    return slots, nbytes


def _channels(precision: Channels, geometry: Geometry, weights: str) -> dict[str, Way]:
    """Return an expert of which half the channels of the target are read, as many, and all."""
    layer = geometry.model_copy(
        update={"n_experts": MOST, "moe_layers": [0], "n_layers": 1, "top_k": 1}
    )
    kernel = kernel_of(precision, layer, weights)
    slots, whole = _different(kernel, kernel.levels[0], precision.blocks, MEMORY)
    per_weight = Fraction(whole, geometry.expert_weights)
    cost = channel_cost(
        geometry, rank=precision.rank, group=precision.group, bytes_per_weight=per_weight
    )
    each = cost.kept(precision.reads)
    found = {}
    for n in sorted({max(each // 2, 1), each, cost.channels} - {0}):
        kept = Kept(n, each, cost.channels)
        nbytes = cost.read_bytes(n)
        found[f"{precision.kernel}{SEPARATOR}{nbytes}"] = Way(
            nbytes, Experts(kernel, kept), cycle(slots), cycle(range(MOST))
        )
    return found


class Kept(Precision):
    """Channels that are drawn, *union* of them over the tokens of an expert, however many."""

    def __init__(self, union: int, each: int, channels: int) -> None:
        """Let a token keep *each* of *channels*, and more where the union takes that."""
        self._union, self._each, self._channels = union, each, channels
        self._rng = np.random.default_rng(0)

    def channels(self, batch: LayerBatch) -> Bools:
        """Return which channels each entry keeps, (entries, channels)."""
        tokens, union = batch.n_tokens, self._union
        kept = min(max(self._each, -(-union // tokens)), union)
        chosen = self._rng.permutation(self._channels)[:union]
        places = (np.arange(tokens)[:, None] * kept + np.arange(kept)) % union
        mask = np.zeros((tokens, self._channels), np.bool_)
        np.put_along_axis(mask, chosen[places], True, 1)
        return mask.repeat(len(batch.experts) // tokens, 0)


def _slot(data: Bytes) -> Slot:
    memory = page_memory(len(data))
    memory[: len(data)] = data.tobytes()
    return Slot(memory, len(data))


MEMORY = Place(CPU, _slot)
