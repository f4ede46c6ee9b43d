"""This module runs a policy on the disk machine as `sim.run.simulate` runs it in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moetier.sim.layout import Layout
from moetier.sim.machine.base import Machine, OnSpan
from moetier.sim.machine.costs import Costs
from moetier.sim.machine.hierarchy import Hierarchy
from moetier.sim.memory import extent_of
from moetier.sim.policy.base import Precision
from moetier.sim.run import MachineFactory, Result, Setting, TraceSource, set_up, simulate
from moetier.sim.warnings import modelled
from moetier.validate.machines.disk import DiskMachine
from moetier.validate.machines.experts import Kernel
from moetier.validate.machines.kernels.of_policy import kernel_of
from moetier.validate.machines.lanes import said_of_pace
from moetier.validate.machines.pacing import Pace
from moetier.validate.machines.random_weights import Bytes
from moetier.validate.machines.slices_file import (
    Index,
    OnProgress,
    SlicesFile,
    write_slices,
)
from moetier.validate.machines.tier import slots_for
from moetier.validate.machines.trace_machine import Hidden


class DiskMachines:
    """Makes disk machines that read one file: a `MachineFactory`.

    `machines` has those made so far, which `disk_machine` closes.
    """

    def __init__(self, file: SlicesFile, threads: int, given: dict[str, Any]) -> None:
        """Make machines of *file*; *given* are arguments of `DiskMachine`."""
        self.machines: list[DiskMachine] = []
        self._file, self._threads, self._given = file, threads, given

    def __call__(
        self, hierarchy: Hierarchy, costs: Costs, layout: Layout, on_span: OnSpan | None = None
    ) -> Machine:
        """Return an idle machine; raises as `DiskMachine` does."""
        machine = DiskMachine(self._file, hierarchy, costs, layout, on_span, **self._given)
        self.machines.append(machine)
        return machine

    @property
    def limitations(self) -> list[str]:
        """Return what a reader of the figures must know about how they were made."""
        index = self._file.index
        return [
            "time is measured on this machine; energy is modelled, from the bytes and the profile",
            f"slices are read by {self._file.file.how}, and computed by {self._threads} thread"
            f"{'' if self._threads == 1 else 's'} of torch",
            f"the experts are {index.content} weights in {index.weights}; the dense part is random "
            "weights of its true size, multiplied in few large products",
            *said_of_pace(self._given.get("pace"), [machine.lanes for machine in self.machines]),
        ]


@contextmanager
def disk_machine(
    path: str | Path,
    *,
    lanes: int | None = None,
    pace: Pace | None = None,
    threads: int = 1,
    slot_bytes: int | None = None,
    context: int = 0,
    kernel: Kernel | None = None,
    precision: Precision | None = None,
    hidden: Hidden | None = None,
    seed: int = 0,
) -> Iterator[DiskMachines]:
    """Yield a factory of machines that read the slices in *path*, for `simulate(machine=...)`.

    torch computes with *threads* threads meanwhile; the other arguments are those of `DiskMachine`.
    At the end, whatever happened, all threads are gone and the file is closed.

    Raises:
        InputError: If the file cannot be used.
    """
    given: dict[str, Any] = {
        "lanes": lanes, "pace": pace, "slot_bytes": slot_bytes, "context": context,
        "kernel": kernel, "precision": precision, "hidden": hidden, "seed": seed,
    }  # fmt: skip
    before = torch.get_num_threads()
    with SlicesFile(path) as file:
        machines = DiskMachines(file, threads, given)
        torch.set_num_threads(threads)
        try:
            yield machines
        finally:
            torch.set_num_threads(before)
            for machine in machines.machines:
                machine.close()


def pack_synthetic(
    path: str | Path,
    source: TraceSource,
    setting: Setting,
    *,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> Index:
    """Write to *path* the slices that *source* under *setting* needs, with random weights.

    They are laid out as the policy's precision stores them, for its kernel (`kernels.of_policy`).

    Raises:
        InputError: If the parts of the setting do not fit together, no kernel computes them, or the
            disk has no room.
    """
    stage = set_up(source.header, setting, extent_of(source))
    geometry, layout = source.header.geometry, stage.layout
    kernel = kernel_of(stage.policy.precision, geometry, stage.weights)

    def content(slice_id: int) -> Bytes:
        return kernel.made_up(layout.part_of(slice_id), seed, slice_id)

    return write_slices(
        path,
        layout,
        content,
        geometry=geometry,
        weights=stage.weights,
        source="synthetic",
        seed=seed,
        on_progress=on_progress,
    )


def run_on_disk(
    source: TraceSource,
    setting: Setting,
    path: str | Path,
    *,
    lanes: int | None = None,
    pace: Pace | None = None,
    threads: int = 1,
    kernel: Kernel | None = None,
    seed: int = 0,
    around: Callable[[MachineFactory], MachineFactory] | None = None,
    **run: Any,
) -> Result:
    """Run *source* under *setting* with the slices in *path*, and return what `simulate` returns.

    Memory for slices is bounded by what the capacity of the setting may come to need. *run* goes to
    `simulate`; the other arguments are those of `disk_machine`. *kernel* is by default the one for
    the policy's precision; *around* may wrap the machine. `known_limitations` also says how the
    machine worked.

    Raises:
        InputError: If the parts do not fit together, or the machine fails during the run.
    """
    extent = extent_of(source)
    stage = set_up(source.header, setting, extent)
    link, precision = stage.hierarchy.links[0], stage.policy.precision
    if kernel is None:
        kernel = kernel_of(precision, source.header.geometry, stage.weights, seed)
    with disk_machine(
        path,
        lanes=lanes,
        pace=pace,
        threads=threads,
        slot_bytes=slots_for(stage.layout, stage.capacities[0], lanes or link.lanes),
        context=extent.context,
        kernel=kernel,
        precision=precision,
        seed=seed,
    ) as machines:
        factory = machines if around is None else around(machines)
        result = simulate(source, setting, machine=factory, stage=stage, **run)
        untrue = modelled(setting.profile)
        said = [said for said in result.known_limitations if said not in untrue]
        return replace(result, known_limitations=[*machines.limitations, *said])
