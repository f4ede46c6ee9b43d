"""This module turns a model's experts into slices, and slices into experts a model computes with.

One class per way of storing: whole, in codes, in bit slices, in two copies, in channels. Biases
are in the slice of a whole expert; beside codes the model's own stay in memory, as they are.

Shapes: E experts of a layer, U of them that a forward pass uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from moetier.sim.policy.base import ExpertFormat, Precision
from moetier.sim.policy.precision.bit_sliced import BitSliced
from moetier.sim.policy.precision.channels import Channels
from moetier.sim.policy.precision.hobbit import Hobbit
from moetier.traces.capture.find import MoeLayer
from moetier.traces.errors import InputError
from moetier.validate.machines.experts import Levels
from moetier.validate.machines.kernels.code_stream import CodeFormat
from moetier.validate.numerics.experts import ExpertMatrices, expert_matrices, stacked_matrices
from moetier.validate.numerics.slices import SliceFormat, pack, sliced, unpack_weights


class Place(NamedTuple):
    """Where an expert goes: row *at* of the (U, ...) parameters that a layer has for now.

    *rows* are that row of each of its `routed_parameters`, in their order.
    """

    where: MoeLayer
    at: int
    rows: list[Tensor]


class Stored(Protocol):
    """A way of storing experts; `levels` has the parts that each level of a policy reads."""

    levels: Levels

    def slices(self, where: MoeLayer, expert: int) -> list[Tensor]:
        """Return the bytes of an expert's slices by part, uint8, from the model's own weights."""
        ...

    def write(self, place: Place, buffers: Sequence[Tensor | None]) -> None:
        """Write an expert to its *place*.

        *buffers* are the bytes of its slices by part; None for one that is not read.
        """
        ...


def stored_as(precision: Precision, layers: Sequence[MoeLayer], dtype: torch.dtype) -> Stored:
    """Return how *precision* stores the experts of *layers*; whole ones in *dtype*.

    Raises:
        InputError: If a model cannot compute from such slices.
    """
    match precision:
        case BitSliced():
            return _BitSlices(SliceFormat.of(_first(layers), *precision.bits, precision.group))
        case Hobbit():
            high, low = (_of_format(kind, layers, dtype) for kind in precision.formats)
            return _Copies(high, low)
        case Channels():
            return _Channels(precision.blocks, dtype)
    if len(precision.formats) == 1:
        return _of_format(precision.formats[0], layers, dtype)
    raise InputError(
        f"a model cannot compute precision '{type(precision).__name__}' from a disk",
        where="policy.precision",
        way_out="use one of `moetier list policies`, or leave `machine` out",
    )


def routed_parameters(where: MoeLayer) -> list[nn.Parameter]:
    """Return the parameters of a layer that have a row for each expert, in the model's order."""
    found = where.experts.parameters()
    return [value for value in found if value.dim() > 1 and len(value) == where.n_experts]


class _Whole:
    """Every parameter of an expert after the other, in one type."""

    levels: Levels = ((0,),)

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def slices(self, where: MoeLayer, expert: int) -> list[Tensor]:
        parts = []
        for value in routed_parameters(where):
            stored = _exactly(value[expert].detach(), self._dtype, where)
            parts.append(stored.flatten().view(torch.uint8))
        return [torch.cat(parts)]

    def write(self, place: Place, buffers: Sequence[Tensor | None]) -> None:
        data, begin = _there(buffers[0]), 0
        for row in place.rows:
            end = begin + row.numel() * self._dtype.itemsize
            row.copy_(data[begin:end].view(self._dtype).view(row.shape))
            begin = end


class _Codes:
    """Codes of one width."""

    levels: Levels = ((0,),)

    def __init__(self, how: CodeFormat) -> None:
        self._how = how

    def slices(self, where: MoeLayer, expert: int) -> list[Tensor]:
        how = self._how
        codes = sliced(_without_biases(where, expert), how.bits, how.group, where.name)
        return [how.pack(codes)]

    def write(self, place: Place, buffers: Sequence[Tensor | None]) -> None:
        _write_matrices(place, *self._how.weights(_there(buffers[0])))


class _BitSlices:
    """MSB and LSB slices."""

    levels: Levels = ((0, 1), (0,))

    def __init__(self, how: SliceFormat) -> None:
        self._how = how

    def slices(self, where: MoeLayer, expert: int) -> list[Tensor]:
        codes = sliced(expert_matrices(where)[expert], self._how.high, self._how.group, where.name)
        return list(pack(codes, self._how))

    def write(self, place: Place, buffers: Sequence[Tensor | None]) -> None:
        up, down, _, _ = unpack_weights(self._how, _there(buffers[0]), buffers[1])
        _write_matrices(place, up, down)


class _Channels:
    """Blocks of channels: of each its gate rows, its up rows, and its down columns."""

    def __init__(self, blocks: int, dtype: torch.dtype) -> None:
        self.levels: Levels = (tuple(range(blocks)),)
        self._blocks, self._dtype = blocks, dtype

    def slices(self, where: MoeLayer, expert: int) -> list[Tensor]:
        m = expert_matrices(where)[expert]
        if m.gate is None or m.biases():
            raise InputError(
                "channels are stored of gated experts without biases",
                where=where.name,
                way_out="use another precision, or leave `machine` out",
            )
        stored = _exactly(torch.stack([m.gate, m.up, m.down.mT]), self._dtype, where)
        blocks = stored.chunk(self._blocks, 1)  # the policy has seen that they are equal
        return [block.flatten().view(torch.uint8) for block in blocks]

    def write(self, place: Place, buffers: Sequence[Tensor | None]) -> None:
        stack, at = stacked_matrices(place.where), place.at
        assert stack.gate is not None
        n_channels, hidden = stack.up.shape[1:]
        each = n_channels // self._blocks
        for block, data in enumerate(buffers):
            if data is not None:
                gate, up, down = data.view(self._dtype).view(3, each, hidden)
                rows = slice(block * each, (block + 1) * each)
                stack.gate[at, rows].copy_(gate)
                stack.up[at, rows].copy_(up)
                stack.down[at, :, rows].copy_(down.mT)


class _Copies:
    """Two slices, each an expert of its own precision."""

    levels: Levels = ((0,), (1,))

    def __init__(self, high: Stored, low: Stored) -> None:
        self._copies = (high, low)

    def slices(self, where: MoeLayer, expert: int) -> list[Tensor]:
        return [copy.slices(where, expert)[0] for copy in self._copies]

    def write(self, place: Place, buffers: Sequence[Tensor | None]) -> None:
        part = next(part for part, buffer in enumerate(buffers) if buffer is not None)
        self._copies[part].write(place, [buffers[part]])


def _of_format(kind: ExpertFormat, layers: Sequence[MoeLayer], dtype: torch.dtype) -> Stored:
    if kind.bits is None:
        return _Whole(dtype)
    first = _first(layers)
    inner, hidden = first.up.shape
    return _Codes(CodeFormat(kind.bits, kind.group, hidden, inner, first.gate is not None))


def _exactly(value: Tensor, dtype: torch.dtype, where: MoeLayer) -> Tensor:
    """Return *value* in *dtype*, contiguous; raise `InputError` where that changes a number."""
    stored = value.to(dtype).contiguous()
    if not torch.equal(stored.to(value.dtype), value):
        raise InputError(
            f"weights change when they are stored as {dtype}",
            where=where.name,
            way_out="load the model in the type it is stored in",
        )
    return stored


def _first(layers: Sequence[MoeLayer]) -> ExpertMatrices:
    return expert_matrices(layers[0])[0]


def _without_biases(where: MoeLayer, expert: int) -> ExpertMatrices:
    m = expert_matrices(where)[expert]
    return ExpertMatrices(m.gate, m.up, m.down, None, None, None, m.activation)


def _write_matrices(place: Place, up: Tensor, down: Tensor) -> None:
    stack, at = stacked_matrices(place.where), place.at
    if stack.gate is not None:
        gate, up = up.chunk(2)
        stack.gate[at].copy_(gate)
    stack.up[at].copy_(up)
    stack.down[at].copy_(down)


def _there(buffer: Tensor | None) -> Tensor:
    if buffer is None:
        raise RuntimeError("an expert is computed whose slice was not read")
    return buffer
