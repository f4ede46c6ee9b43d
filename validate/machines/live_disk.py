"""This module lets a running model compute its experts from a disk: see `live_model`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moetier.sim.layout import Layout
from moetier.sim.machine.base import Machine, OnSpan
from moetier.sim.machine.costs import Costs
from moetier.sim.machine.hierarchy import Hierarchy
from moetier.sim.run import Stage
from moetier.sim.units import format_bytes
from moetier.traces.capture.find import MoeLayer
from moetier.traces.errors import InputError
from moetier.traces.schema import Header
from moetier.validate.live_channels import ChannelReaders
from moetier.validate.machines.lanes import said_of_pace
from moetier.validate.machines.live_machine import LiveMachine
from moetier.validate.machines.live_model import Living, ModelSlices, stored_for_run
from moetier.validate.machines.pacing import Pace
from moetier.validate.machines.slices_file import OnProgress, SlicesFile, write_slices
from moetier.validate.machines.slots import require_memory
from moetier.validate.machines.stored import Stored, routed_parameters
from moetier.validate.machines.tier import slots_for

FILE = "experts.slices"


@dataclass(frozen=True, slots=True)
class OnDisk:
    """How a model lives on a disk.

    *lanes* threads read, by default as many as the link of the profile has lanes, each held to
    *pace*. The file is in a folder of its own inside *folder*, by default where the system keeps
    temporary files, and is removed at the end.
    """

    lanes: int | None = None
    pace: Pace | None = None
    folder: Path | None = None


class LivingOnDisk(Living):
    """A model whose experts are in a file, until `on_disk` ends."""

    def __init__(
        self,
        file: SlicesFile,
        layers: Sequence[MoeLayer],
        stored: Stored,
        stage: Stage,
        how: OnDisk,
        channels: ChannelReaders | None = None,
    ) -> None:
        """Take slices from *file*; see `Living`."""
        super().__init__(layers, stored, stage, channels)
        self._file, self._how = file, how

    def machine(
        self, hierarchy: Hierarchy, costs: Costs, layout: Layout, on_span: OnSpan | None = None
    ) -> Machine:
        """Return the machine of a run: a `MachineFactory`."""
        lanes = self._how.lanes or hierarchy.links[0].lanes
        machine = LiveMachine(
            self._file,
            hierarchy,
            layout,
            on_span,
            lanes=lanes,
            pace=self._how.pace,
            slot_bytes=slots_for(layout, self._stage.capacities[0], lanes),
        )
        self.made.append(machine)
        return machine

    @property
    def limitations(self) -> list[str]:
        """Return what a reader of the figures must know about how they were made."""
        return [
            "time is measured on this machine, where the model ran; energy is modelled, from the "
            "bytes and the profile",
            f"{format_bytes(sum(self._file.nbytes))} of experts were in a file, read by "
            f"{self._file.file.how}; the dense part is the model's own, and includes what the host "
            "program does between batches",
            "experts of padding and of finished requests are read with the clock stopped",
            *said_of_pace(self._how.pace, [machine.lanes for machine in self.made]),
        ]


@contextmanager
def on_disk(
    model: Any,
    layers: Sequence[MoeLayer],
    header: Header,
    stage: Stage,
    how: OnDisk,
    *,
    channels: ChannelReaders | None = None,
    on_progress: OnProgress | None = None,
) -> Iterator[Living]:
    """Write the experts of *model* to a file, and let it compute from there until the block ends.

    Then, whatever happened, the model is as it was, and no file or thread is left.

    Args:
        model: On the CPU.
        layers: All of its MoE layers.
        header: What is known of it.
        stage: The run; its precision says how experts are stored.
        how: Where, and how it is read.
        channels: What reads channels of the experts, where the policy says so.
        on_progress: Told (bytes written, bytes in all).

    Raises:
        InputError: If a model cannot compute so, the disk has no room, or memory does not suffice.
    """
    if model.device.type != "cpu":
        raise InputError(
            f"the disk machine computes on the CPU, and the model is on {model.device}",
            where="machine",
            way_out="load the model on the CPU",
        )
    layout, stored = stage.layout, stored_for_run(model, layers, header, stage)
    # The originals wait aside; the largest layer may be put together from all of its experts.
    largest = max(sum(v.nbytes for v in routed_parameters(where)) for where in layers)
    require_memory(largest, "the experts of a layer")
    with TemporaryDirectory(prefix="moetier-", dir=how.folder) as folder, ExitStack() as stack:
        path = Path(folder) / FILE
        write_slices(
            path,
            layout,
            ModelSlices(layers, stored, layout),
            geometry=header.geometry,
            weights=stage.weights,
            source="model",
            on_progress=on_progress,
        )
        file = stack.enter_context(SlicesFile(path))
        living = LivingOnDisk(file, layers, stored, stage, how, channels)
        stack.callback(living.close)
        stack.enter_context(living.moved_out(model))
        yield living
