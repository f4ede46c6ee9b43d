"""This module lists the ways in which a policy's precision has experts computed, ready to be timed.

A way is a kernel with a choice of slices: an expert in bit slices is computed from its MSB slice
alone, or from both. Each has a row of its own in a profile, by the kernel's name and its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from moetier.sim.policy.base import Precision
from moetier.sim.policy.precision.channels import Channels
from moetier.traces.geometry import Geometry
from moetier.validate.machines.direct import page_memory
from moetier.validate.machines.experts import Experts, Kernel, WholeKernel
from moetier.validate.machines.kernels.of_policy import kernel_of
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


def whole(kernel: WholeKernel) -> dict[str, Way]:
    """Return whole experts."""
    return _named(Precision.kernel, kernel, [(0,)], 1)


def ways(precision: Precision, geometry: Geometry, weights: str) -> dict[str, Way]:
    """Return the ways of *precision* by name; none for channels, which have no fixed bytes.

    Raises:
        InputError: If no kernel computes it.
    """
    if isinstance(precision, Channels):
        return {}
    kernel = kernel_of(precision, geometry, weights)
    parts = max(part for level in kernel.levels for part in level) + 1
    return _named(precision.kernel, kernel, list(kernel.levels), parts)


def kernel_name(way: str) -> str:
    """Return the kernel of the way that is called *way*."""
    return way.partition(SEPARATOR)[0]


def _named(
    name: str, kernel: Kernel, levels: Sequence[Sequence[int]], parts: int
) -> dict[str, Way]:
    found = {}
    for level in levels:
        made = {part: kernel.made_up(part, 0) for part in level}
        nbytes = sum(len(data) for data in made.values())
        count = max(-(-UNCACHED // nbytes), 2) if nbytes > SMALL else MOST
        slots = [
            [_slot(made[part]) if part in made else None for part in range(parts)]
            for _ in range(count)
        ]
        found[f"{name}{SEPARATOR}{nbytes}"] = Way(nbytes, Experts(kernel), cycle(slots))
    return found


def _slot(data: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> Slot:
    memory = page_memory(len(data))
    memory[: len(data)] = data.tobytes()
    return Slot(memory, len(data))
