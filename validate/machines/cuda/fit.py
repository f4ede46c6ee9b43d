"""This module says how many layers of a model fit into pinned memory and onto a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moetier.sim.run import Stage
from moetier.sim.units import format_bytes
from moetier.traces.errors import InputError
from moetier.validate.machines.cuda.host import host_bytes
from moetier.validate.machines.cuda.run import dense_alike, stored_alike
from moetier.validate.machines.tier import slots_for


@dataclass(frozen=True, slots=True)
class Need:
    """The bytes that runs take of the host's pinned memory, and of the device."""

    pinned: int
    device: int


def need_of(stages: Sequence[Stage], lanes: int) -> Need:
    """Return what the runs *stages* need one after the other, as `CudaRuns` keeps things.

    Slices are pinned once for each way of storing experts, and dense weights stay on the device
    once for each kind; slots come and go with each run.
    """
    pinned = {stored_alike(stage): host_bytes(stage.layout) for stage in stages}
    dense = {
        dense_alike(stage.costs.dense): int(stage.costs.dense.weight_bytes.sum()) + stage.budget.kv
        for stage in stages
    }
    slots = max(slots_for(stage.layout, stage.capacities[0], lanes) for stage in stages)
    return Need(sum(pinned.values()), sum(dense.values()) + slots)


def layers_that_fit(
    layers: int, need: Callable[[int], Need], pinned: int | None, device: int | None
) -> int:
    """Return the most layers, up to *layers*, whose *need* fits into what is free.

    *need* must not fall with more layers. *pinned* and *device* are the bytes that are free; None
    where nobody knows, and then all fit.

    Raises:
        InputError: If not even one layer fits, with the bytes needed and those that are free.
    """

    def fits(count: int) -> bool:
        wanted = need(count)
        return (pinned is None or wanted.pinned <= pinned) and (
            device is None or wanted.device <= device
        )

    if fits(layers):
        return layers
    low, high = 0, layers  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low == 0:
        one = need(1)
        raise InputError(
            f"one layer takes {_said(one.pinned)} of pinned memory and {_said(one.device)} of the "
            f"device, and {_said(pinned)} and {_said(device)} are free",
            where="memory",
            way_out="use a smaller model, fewer precisions, or less capacity",
        )
    return low


def _said(nbytes: int | None) -> str:
    return "an unknown amount" if nbytes is None else f"{format_bytes(nbytes)} ({nbytes} bytes)"
