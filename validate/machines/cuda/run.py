"""This module runs policies on a device as `sim.run.simulate` runs them in virtual time.

What takes long to make is kept from one run to the next: the slices in pinned memory, once for each
way of storing experts, and the weights of the dense part on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

from moetier.sim.layout import Layout
from moetier.sim.machine.base import Machine, OnSpan
from moetier.sim.machine.costs import Costs
from moetier.sim.machine.hierarchy import Hierarchy
from moetier.sim.machine.work import DenseWork
from moetier.sim.memory import extent_of
from moetier.sim.run import MachineFactory, Result, Setting, Stage, TraceSource, set_up, simulate
from moetier.sim.warnings import modelled
from moetier.traces.geometry import Geometry
from moetier.validate.closing import Closing
from moetier.validate.machines.cuda.device import Device, require
from moetier.validate.machines.cuda.host import HostSlices
from moetier.validate.machines.cuda.kernel import device_kernel
from moetier.validate.machines.cuda.machine import CudaMachine
from moetier.validate.machines.dense import Dense
from moetier.validate.machines.experts import Kernel
from moetier.validate.machines.random_weights import Bytes
from moetier.validate.machines.slices_file import OnProgress
from moetier.validate.machines.tier import slots_for
from moetier.validate.machines.trace_machine import Hidden


@dataclass(frozen=True)
class CudaResult(Result):
    """What a run says, and the energy that the device counted during it."""

    energy_uj: int | None = None  # microjoules; None where nothing counts, or for too short a run


class CudaRuns(Closing):
    """Runs on one *device*, which stays the caller's to close; use it as a context manager."""

    def __init__(self, device: Device, *, lanes: int | None = None, seed: int = 0) -> None:
        """Copy on *lanes* streams, by default as many as the link of a profile has lanes.

        *seed* is of weights and hidden states.
        """
        self.device, self._lanes, self._seed = device, lanes, seed
        self._hosts: dict[Hashable, HostSlices] = {}
        self._dense: dict[Hashable, Dense] = {}

    def pin(
        self, geometry: Geometry, stage: Stage, on_progress: OnProgress | None = None
    ) -> HostSlices:
        """Return the slices of *stage*, a run of the model *geometry*, with random weights.

        They are made and pinned when they are first asked for.

        Raises:
            InputError: If no kernel computes them on a device, or the host has not the memory.
        """
        key = stored_alike(stage)
        if key not in self._hosts:
            kernel = device_kernel(stage.policy.precision, geometry, stage.weights)
            self._hosts[key] = HostSlices(
                self.device,
                stage.layout,
                partial(_made_up, kernel, stage.layout, self._seed),
                geometry=geometry,
                weights=stage.weights,
                source="synthetic",
                on_progress=on_progress,
            )
        return self._hosts[key]

    def run(
        self,
        source: TraceSource,
        setting: Setting,
        *,
        hidden: Hidden | None = None,
        around: Callable[[MachineFactory], MachineFactory] | None = None,
        **run: Any,
    ) -> CudaResult:
        """Run *source* under *setting*, and return what `simulate` returns and the energy.

        Memory for slices on the device is bounded by what the capacity of the setting may come to
        need. *run* goes to `simulate`; *around* may wrap the machine, *hidden* gives the hidden
        states. `known_limitations` also says how the machine worked. Whatever happens, no thread
        and no memory of the run is left; slices and dense weights are, until `close`.

        Raises:
            InputError: If the parts do not fit together, or memory does not suffice.
            BaseException: What a copy failed with.
        """
        extent = extent_of(source)
        stage = set_up(source.header, setting, extent)
        geometry = source.header.geometry
        host = self.pin(geometry, stage)
        made: list[CudaMachine] = []

        def machine(
            hierarchy: Hierarchy, costs: Costs, layout: Layout, on_span: OnSpan | None = None
        ) -> Machine:
            lanes = self._lanes or hierarchy.links[0].lanes
            made.append(
                CudaMachine(
                    host,
                    self.device,
                    hierarchy,
                    layout,
                    on_span,
                    dense=self.dense(costs.dense, geometry, stage.weights, extent.context),
                    kernel=device_kernel(stage.policy.precision, geometry, stage.weights),
                    lanes=lanes,
                    slot_bytes=slots_for(layout, stage.capacities[0], lanes),
                    precision=stage.policy.precision,
                    hidden=hidden,
                    seed=self._seed,
                )
            )
            return made[-1]

        factory: MachineFactory = machine if around is None else around(machine)
        try:
            result = simulate(source, setting, machine=factory, stage=stage, **run)
            energy = made[0].energy
        finally:
            for one in made:
                one.close()
        untrue = modelled(setting.profile)
        said = [said for said in result.known_limitations if said not in untrue]
        found = replace(result, known_limitations=[*self._limitations(stage), *said])
        return CudaResult(**vars(found), energy_uj=energy)

    def dense(self, work: DenseWork, geometry: Geometry, weights: str, context: int = 0) -> Dense:
        """Return what computes the dense part *work* of *geometry* on the device."""
        key = (geometry.model_dump_json(), weights, dense_alike(work))
        if key not in self._dense:
            device = self.device
            self._dense[key] = Dense(
                work,
                geometry,
                weights,
                context=context,
                seed=self._seed,
                device=device.torch,
                require=lambda nbytes, what: require(nbytes, device.free(), what),
            )
        self._dense[key].reserve(context)
        self.device.synchronise()  # what was made is not on the stream that computes
        return self._dense[key]

    def close(self) -> None:
        """Give all memory back; closing twice does nothing."""
        for host in self._hosts.values():
            host.close()
        self._hosts.clear()
        self._dense.clear()

    def _limitations(self, stage: Stage) -> list[str]:
        """Return what a reader of the figures must know about how they were made."""
        return [
            f"time is measured on {self.device.name}; energy in the records is modelled, from the "
            "bytes and the profile",
            "slices are copied from pinned memory, one stream and one thread of the host per lane; "
            f"the experts are random weights in {stage.weights}",
            "the dense part is random weights of its true size, multiplied in few large products; "
            "the host waits for it before it orders copies, as a router's choice has to reach it",
        ]


def run_on_cuda(
    source: TraceSource,
    setting: Setting,
    device: Device,
    *,
    lanes: int | None = None,
    seed: int = 0,
    **run: Any,
) -> CudaResult:
    """Run once, and give all memory back; the arguments are those of `CudaRuns.run`."""
    with CudaRuns(device, lanes=lanes, seed=seed) as runs:
        return runs.run(source, setting, **run)


def stored_alike(stage: Stage) -> Hashable:
    """Return a key that runs share whose slices are the same bytes."""
    layout = stage.layout
    return stage.policy.precision.kernel, stage.weights, layout.n_parts, tuple(layout.nbytes)


def dense_alike(work: DenseWork) -> Hashable:
    """Return a key that runs of a model share whose dense part is the same."""
    return tuple(np.asarray(getattr(work, field.name)).tobytes() for field in fields(work))


def _made_up(kernel: Kernel, layout: Layout, seed: int, slice_id: int) -> Bytes:
    return kernel.made_up(layout.part_of(slice_id), seed, slice_id)
