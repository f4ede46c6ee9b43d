"""This module lets a running model compute its experts from a disk.

For the time of a run every expert is a set of slices in a file, and in the model's parameters there
is nothing but NaN, so that what was not read cannot be computed with. When a layer's router has
spoken, the machine reads what the plan says and the model waits; then the experts it uses are put
together from the slots they were read into, in ascending id, and handed to the implementation that
the model had. It sees fewer experts, each with the rows it always had, so no bit changes.

Not every expert a forward pass touches is in the plan. Those of padding and of finished requests
are read aside with the clock stopped; those that all tokens weigh with 0 are zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
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
from moetier.traces.capture.hook import arguments
from moetier.traces.capture.nbytes import stored_dtype
from moetier.traces.errors import InputError
from moetier.traces.schema import Header
from moetier.validate.live_channels import ChannelReaders
from moetier.validate.machines.live_machine import DiskDriver, LiveDisk
from moetier.validate.machines.pacing import Pace
from moetier.validate.machines.random_weights import Bytes
from moetier.validate.machines.slices_file import OnProgress, SlicesFile, write_slices
from moetier.validate.machines.slots import require_memory
from moetier.validate.machines.stored import Place, Stored, routed_parameters, stored_as
from moetier.validate.machines.tier import slots_for
from moetier.validate.numerics.experts import stacked_matrices

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


class Living:
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
        """Take slices from *file*, as *stored* by the policy of *stage*; *channels* of experts."""
        self._file, self._layers, self._stored, self._stage = file, layers, stored, stage
        self._how, self._channels = how, channels
        self._driver: DiskDriver | None = None
        self._own: dict[int, Tensor] = {}  # by parameter: the weights it had
        self.made: list[LiveDisk] = []

    def machine(
        self, hierarchy: Hierarchy, costs: Costs, layout: Layout, on_span: OnSpan | None = None
    ) -> Machine:
        """Return the machine of a run: a `MachineFactory`."""
        lanes = self._how.lanes or hierarchy.links[0].lanes
        machine = LiveDisk(
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

    def driver(self, *given: Any, **more: Any) -> DiskDriver:
        """Return a driver of the model; the arguments are those of `Driver`, less the machine."""
        self._driver = DiskDriver(*given, machine=self.machine, **more)
        return self._driver

    @property
    def limitations(self) -> list[str]:
        """Return what a reader of the figures must know about how they were made."""
        pace, index = self._how.pace, self._file.index
        said = [
            "time is measured on this machine, where the model ran; energy is modelled, from the "
            "bytes and the profile",
            f"{format_bytes(sum(index.nbytes))} of experts were in a file, read by "
            f"{self._file.file.how}; the dense part is the model's own, and includes what the host "
            "program does between batches",
            "experts of padding and of finished requests are read with the clock stopped",
        ]
        if pace is not None:
            said.append(
                f"each lane is held to {format_bytes(pace.rate)}/s after {pace.latency} ns, below "
                "what the disk gives"
            )
        late = [machine.lanes for machine in self.made if machine.lanes.overdue]
        return said + [
            f"{lanes.overdue} of {lanes.served} transfers took longer than the pace allows"
            for lanes in late
        ]

    @contextmanager
    def moved_out(self, model: Any) -> Iterator[None]:
        """Let the layers compute from the file until the block ends; then as before."""
        hook = model.register_forward_pre_hook(lambda *_: self._wake())
        try:
            for where in self._layers:
                for value in routed_parameters(where):
                    self._own[id(value)] = value.data
                    value.data = _nothing(value.data)
                where.experts.forward = partial(self._forward, where)
            yield
        finally:
            hook.remove()
            for where in self._layers:
                where.experts.__dict__.pop("forward", None)
                for value in where.experts.parameters():
                    if id(value) in self._own:
                        value.data = self._own.pop(id(value))

    def close(self) -> None:
        """End the threads of all machines."""
        for machine in self.made:
            machine.close()

    def _wake(self) -> None:
        for machine in self.made:
            machine.wake()

    def _forward(self, where: MoeLayer, *args: Any, **kwargs: Any) -> Any:
        """Compute the experts of a layer from their slots, in place of its `forward`."""
        if self._driver is None:
            raise RuntimeError("nobody drives this model: its experts are in a file")
        hidden, ids, weights = arguments(args, kwargs)
        used, places = torch.unique(ids, return_inverse=True)
        reader = None if self._channels is None else self._channels.readers[where.moe_layer]
        with torch.no_grad():
            if reader is None:
                weighed = torch.zeros(len(used), dtype=torch.bool)
                weighed[places[weights != 0]] = True
                wanted: Sequence[Sequence[int]] = [
                    self._parts(u, w) for u, w in zip(used.tolist(), weighed, strict=True)
                ]
                with self._filled(where, used.tolist(), wanted):
                    forward: Any = type(where.experts).forward
                    made = forward(where.experts, hidden, places.to(ids.dtype), weights)
            else:
                mask = reader.mask(ids)
                wanted = self._blocks(mask, places, len(used))
                with self._filled(where, used.tolist(), wanted):
                    channels = reader.channels.only(used, stacked_matrices(where))
                    made = reader.compute(channels, hidden, places, weights, mask)
        self._driver.computed()
        return made

    def _parts(self, wanted: int, weighed: Any) -> Sequence[int]:
        """Return the parts that compute reads of the expert with id *wanted*: none at weight 0."""
        return self._stored.levels[wanted // self._stage.layout.n_experts] if weighed else ()

    def _blocks(self, mask: Tensor, places: Tensor, count: int) -> list[list[int]]:
        """Return the parts of each of *count* experts in which any channel of *mask* is kept."""
        n_parts = self._stage.layout.n_parts
        kept = mask.view(places.numel(), n_parts, -1).any(-1)
        found = torch.zeros(count, n_parts, dtype=torch.int64)
        found.index_add_(0, places.flatten(), kept.long())
        return [row.nonzero()[:, 0].tolist() for row in found]

    @contextmanager
    def _filled(
        self, where: MoeLayer, used: list[int], wanted: Sequence[Sequence[int]]
    ) -> Iterator[None]:
        """Let the layer have the experts *used*, each with its parts *wanted*, while that lasts."""
        module: Any = where.experts
        n_experts = where.n_experts
        kept = [value for value in module.parameters() if id(value) in self._own]
        away = [value.data for value in kept]
        try:
            for value in kept:
                own = self._own[id(value)]
                if own.dim() > 2:
                    value.data = own.new_zeros((len(used), *own.shape[1:]))
                else:  # biases, which whole experts bring along
                    value.data = own[[u % n_experts for u in used]]
            for at, (which, parts) in enumerate(zip(used, wanted, strict=True)):
                if parts:
                    place = Place(where, at, [value.data[at] for value in kept])
                    self._write(place, which % n_experts, parts)
            module.num_experts = len(used)
            yield
        finally:
            module.num_experts = n_experts
            for value, data in zip(kept, away, strict=True):
                value.data = data

    def _write(self, place: Place, expert: int, parts: Sequence[int]) -> None:
        layout, layer = self._stage.layout, place.where.moe_layer
        found = self.made[-1].data([layout.slice_id(layer, expert, part) for part in parts])
        buffers: list[Tensor | None] = [None] * layout.n_parts
        for part, data in zip(parts, found, strict=True):
            buffers[part] = data
        self._stored.write(place, buffers)


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
    if stage.hierarchy.overlap:
        raise InputError(
            "a model computes the experts of a layer in one call, none before the last is there",
            where="overlap",
            way_out="leave it out for `machine: {kind: disk}`",
        )
    layout, dtype = stage.layout, stored_dtype(model, list(layers))
    if stage.weights not in header.expert_bytes:
        raise InputError(
            f"counts bytes of {stage.weights}, and the experts are stored in {header.weights}",
            where="weights",
            way_out="leave `weights` out, so that what is counted is what is read",
        )
    stored = stored_as(stage.policy.precision, layers, dtype)
    # The originals wait aside; the largest layer may be put together from all of its experts.
    largest = max(sum(v.nbytes for v in routed_parameters(where)) for where in layers)
    require_memory(largest, "the experts of a layer")
    with TemporaryDirectory(prefix="moetier-", dir=how.folder) as folder, ExitStack() as stack:
        path = Path(folder) / FILE
        write_slices(
            path,
            layout,
            _Content(layers, stored, layout),
            geometry=header.geometry,
            weights=stage.weights,
            source="model",
            on_progress=on_progress,
        )
        file = stack.enter_context(SlicesFile(path))
        living = Living(file, layers, stored, stage, how, channels)
        stack.callback(living.close)
        stack.enter_context(living.moved_out(model))
        yield living


class _Content:
    """The bytes of every slice; an expert is taken apart once for all of its parts."""

    def __init__(self, layers: Sequence[MoeLayer], stored: Stored, layout: Layout) -> None:
        self._layers, self._stored, self._layout = layers, stored, layout
        self._last: tuple[int, list[Tensor]] = (-1, [])

    def __call__(self, slice_id: int) -> Bytes:
        layout, whose = self._layout, slice_id // self._layout.n_parts
        if self._last[0] != whose:
            where = self._layers[layout.layer_of(slice_id)]
            self._last = whose, self._stored.slices(where, layout.expert_of(slice_id))
        found: Bytes = self._last[1][layout.part_of(slice_id)].numpy()
        return found


def _nothing(value: Tensor) -> Tensor:
    """Return NaN of the shape of *value*, in the memory of one number."""
    return torch.full((1,) * value.dim(), torch.nan, dtype=value.dtype).expand(value.shape)
