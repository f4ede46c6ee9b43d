"""This module lets a running model compute its experts from pinned memory: see `live_model`.

The model is on a device, its experts are in memory of the host, and what the plan says is copied to
slots beside the model. For the end of a run the originals wait in memory of the host too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moetier.sim.layout import Layout
from moetier.sim.machine.base import Machine, OnSpan
from moetier.sim.machine.costs import Costs
from moetier.sim.machine.hierarchy import Hierarchy
from moetier.sim.run import Stage
from moetier.sim.units import format_bytes
from moetier.traces.capture.find import MoeLayer
from moetier.traces.errors import InputError
from moetier.traces.schema import Header
from moetier.validate.machines.cuda.device import Device
from moetier.validate.machines.cuda.host import HostSlices
from moetier.validate.machines.cuda.kernel import refuse_channels
from moetier.validate.machines.cuda.tier import DeviceTier
from moetier.validate.machines.live_machine import LiveMachine
from moetier.validate.machines.live_model import Living, ModelSlices, stored_for_run
from moetier.validate.machines.slices_file import OnProgress
from moetier.validate.machines.slots import require_memory
from moetier.validate.machines.stored import Stored, routed_parameters
from moetier.validate.machines.tier import slots_for


@dataclass(frozen=True, slots=True)
class OnDevice:
    """How a model lives on a *device*, which stays the caller's to close.

    Slices are copied on *lanes* streams, by default as many as the link of the profile has lanes.
    """

    device: Device
    lanes: int | None = None


class LiveCuda(DeviceTier, LiveMachine):
    """A `Machine` whose compute is that of a model on a device; made as a `DeviceTier` is."""

    def _settle(self) -> None:
        self._device.synchronise()


class LivingOnDevice(Living):
    """A model whose experts are in pinned memory, until `on_device` ends."""

    def __init__(
        self,
        host: HostSlices,
        home: torch.device,
        layers: Sequence[MoeLayer],
        stored: Stored,
        stage: Stage,
        how: OnDevice,
    ) -> None:
        """Take slices from *host* for a model at *home*; see `Living`."""
        super().__init__(layers, stored, stage)
        self._host, self._home, self._how = host, home, how

    def machine(
        self, hierarchy: Hierarchy, costs: Costs, layout: Layout, on_span: OnSpan | None = None
    ) -> Machine:
        """Return the machine of a run: a `MachineFactory`."""
        lanes = self._how.lanes or hierarchy.links[0].lanes
        machine = LiveCuda(
            self._host,
            self._how.device,
            hierarchy,
            layout,
            on_span,
            lanes=lanes,
            slot_bytes=slots_for(layout, self._stage.capacities[0], lanes),
        )
        self.made.append(machine)
        return machine

    @property
    def limitations(self) -> list[str]:
        """Return what a reader of the figures must know about how they were made."""
        return [
            f"time is measured on {self._how.device.name}, where the model ran; energy is "
            "modelled, from the bytes and the profile",
            f"{format_bytes(sum(self._host.nbytes))} of experts were in pinned memory, copied by "
            "one stream and one thread of the host per lane; the dense part is the model's own, "
            "and includes what the host program does between batches",
            "experts of padding and of finished requests are copied with the clock stopped",
        ]

    def _aside(self, weights: Tensor) -> Tensor:
        return weights.cpu()

    def _back(self, weights: Tensor) -> Tensor:
        return weights.to(self._home)


@contextmanager
def on_device(
    model: Any,
    layers: Sequence[MoeLayer],
    header: Header,
    stage: Stage,
    how: OnDevice,
    *,
    on_progress: OnProgress | None = None,
) -> Iterator[Living]:
    """Pin the experts of *model*, and let it compute from there until the block ends.

    Then, whatever happened, the model is as it was, and no thread or memory is left.

    Args:
        model: On the device of *how*.
        layers: All of its MoE layers.
        header: What is known of it.
        stage: The run; its precision says how experts are stored.
        how: Which device, and how it copies.
        on_progress: Told (bytes written, bytes in all).

    Raises:
        InputError: If a model cannot compute so, or memory does not suffice.
    """
    home = model.device
    if home != how.device.torch:
        raise InputError(
            f"the model is on {home}, and the machine copies to {how.device.torch}",
            where="machine",
            way_out="move the model to the device",
        )
    refuse_channels(stage.policy.precision)
    stored = stored_for_run(model, layers, header, stage)
    # The originals wait aside in memory of the host, beside what is pinned.
    originals = sum(v.nbytes for where in layers for v in routed_parameters(where))
    require_memory(originals, "the experts as they were")
    with ExitStack() as stack:
        host = stack.enter_context(
            HostSlices(
                how.device,
                stage.layout,
                ModelSlices(layers, stored, stage.layout),
                geometry=header.geometry,
                weights=stage.weights,
                source="model",
                on_progress=on_progress,
            )
        )
        living = LivingOnDevice(host, home, layers, stored, stage, how)
        stack.callback(living.close)
        stack.enter_context(living.moved_out(model))
        yield living
