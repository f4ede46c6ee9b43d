"""This module lets a running model compute its experts from slices that a machine brings.

For the time of a run every expert is a set of slices somewhere else, and in the model's parameters
there is nothing but NaN, so that what was not brought cannot be computed with. When a layer's
router has spoken, the machine brings what the plan says and the model waits; then the experts it
uses are put together from the slots they came into, in ascending id, and handed to the
implementation that the model had. It sees fewer experts, each with the rows it always had, so no
bit changes.

Not every expert a forward pass touches is in the plan. Those of padding and of finished requests
are read aside with the clock stopped; those that all tokens weigh with 0 are zeros.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from moetier.sim.layout import Layout
from moetier.sim.machine.base import Machine, OnSpan
from moetier.sim.machine.costs import Costs
from moetier.sim.machine.hierarchy import Hierarchy
from moetier.sim.run import Stage
from moetier.traces.capture.find import MoeLayer
from moetier.traces.capture.hook import arguments
from moetier.traces.capture.nbytes import stored_dtype
from moetier.traces.errors import InputError
from moetier.traces.schema import Header
from moetier.validate.live_channels import ChannelReaders
from moetier.validate.machines.live_machine import LiveMachine, RealDriver
from moetier.validate.machines.random_weights import Bytes
from moetier.validate.machines.stored import Place, Stored, routed_parameters, stored_as
from moetier.validate.numerics.experts import stacked_matrices


class Living(ABC):
    """A model whose experts are somewhere else for the time of a run; what differs is where."""

    def __init__(
        self,
        layers: Sequence[MoeLayer],
        stored: Stored,
        stage: Stage,
        channels: ChannelReaders | None = None,
    ) -> None:
        """Compute *layers* from slices, as *stored* by the policy of *stage*, or *channels*."""
        self._layers, self._stored, self._stage = layers, stored, stage
        self._channels = channels
        self._driver: RealDriver | None = None
        self._own: dict[int, Tensor] = {}  # by parameter: the weights it had
        self.made: list[LiveMachine] = []

    @abstractmethod
    def machine(
        self, hierarchy: Hierarchy, costs: Costs, layout: Layout, on_span: OnSpan | None = None
    ) -> Machine:
        """Return the machine of a run: a `MachineFactory`."""

    def driver(self, *given: Any, **more: Any) -> RealDriver:
        """Return a driver of the model; the arguments are those of `Driver`, less the machine."""
        self._driver = RealDriver(*given, machine=self.machine, **more)
        return self._driver

    @property
    @abstractmethod
    def limitations(self) -> list[str]:
        """Return what a reader of the figures must know about how they were made."""

    @contextmanager
    def moved_out(self, model: Any) -> Iterator[None]:
        """Let the layers compute from slices until the block ends; then as before."""
        hook = model.register_forward_pre_hook(lambda *_: self._wake())
        try:
            for where in self._layers:
                for value in routed_parameters(where):
                    self._own[id(value)] = self._aside(value.data)
                    value.data = _nothing(value.data)
                where.experts.forward = partial(self._forward, where)
            yield
        finally:
            hook.remove()
            for where in self._layers:
                where.experts.__dict__.pop("forward", None)
                for value in where.experts.parameters():
                    if id(value) in self._own:
                        value.data = self._back(self._own.pop(id(value)))

    def close(self) -> None:
        """End the threads of all machines."""
        for machine in self.made:
            machine.close()

    def _aside(self, weights: Tensor) -> Tensor:
        """Return a layer's *weights* where they wait for the end of the run."""
        return weights

    def _back(self, weights: Tensor) -> Tensor:
        """Return *weights* that waited, where the model had them."""
        return weights

    def _wake(self) -> None:
        for machine in self.made:
            machine.wake()

    def _forward(self, where: MoeLayer, *args: Any, **kwargs: Any) -> Any:
        """Compute the experts of a layer from their slots, in place of its `forward`."""
        if self._driver is None:
            raise RuntimeError("nobody drives this model: its experts are elsewhere")
        hidden, ids, weights = arguments(args, kwargs)
        used, places = torch.unique(ids, return_inverse=True)
        reader = None if self._channels is None else self._channels.readers[where.moe_layer]
        with torch.no_grad():
            if reader is None:
                weighed = torch.zeros(len(used), dtype=torch.bool, device=ids.device)
                weighed[places[weights != 0]] = True
                wanted: Sequence[Sequence[int]] = [
                    self._parts(u, w) for u, w in zip(used.tolist(), weighed.tolist(), strict=True)
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
                    shape = (len(used), *own.shape[1:])
                    value.data = torch.zeros(shape, dtype=own.dtype, device=value.device)
                else:  # biases, which whole experts bring along
                    value.data = own[[u % n_experts for u in used]].to(value.device)
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


def stored_for_run(model: Any, layers: Sequence[MoeLayer], header: Header, stage: Stage) -> Stored:
    """Return how the policy of *stage* stores the experts of *model*, for its machine to bring.

    Raises:
        InputError: If a model cannot compute so.
    """
    if stage.hierarchy.overlap:
        raise InputError(
            "a model computes the experts of a layer in one call, none before the last is there",
            where="overlap",
            way_out="leave it out for a real machine",
        )
    if stage.weights not in header.expert_bytes:
        raise InputError(
            f"counts bytes of {stage.weights}, and the experts are stored in {header.weights}",
            where="weights",
            way_out="leave `weights` out, so that what is counted is what is read",
        )
    return stored_as(stage.policy.precision, layers, stored_dtype(model, list(layers)))


class ModelSlices:
    """From a slice of a model to its bytes, for any thread.

    An expert is taken apart once for all its parts.
    """

    def __init__(self, layers: Sequence[MoeLayer], stored: Stored, layout: Layout) -> None:
        """Take the experts of *layers* apart, as they are *stored* in the slices of *layout*."""
        self._layers, self._stored, self._layout = layers, stored, layout
        self._last: tuple[int, list[Tensor]] = (-1, [])
        self._lock = Lock()

    def __call__(self, slice_id: int) -> Bytes:
        """Return the bytes of a slice."""
        layout, whose = self._layout, slice_id // self._layout.n_parts
        with self._lock:
            if self._last[0] != whose:
                where = self._layers[layout.layer_of(slice_id)]
                self._last = whose, self._stored.slices(where, layout.expert_of(slice_id))
            found: Bytes = self._last[1][layout.part_of(slice_id)].cpu().numpy()
        return found


def _nothing(value: Tensor) -> Tensor:
    """Return NaN of the shape of *value*, in the memory of one number."""
    one = torch.full((1,) * value.dim(), torch.nan, dtype=value.dtype, device=value.device)
    return one.expand(value.shape)
