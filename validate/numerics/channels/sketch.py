"""This module makes what a channel reader stores beside a layer's experts, and estimates with it.

Shapes: E experts, H hidden, I channels, G groups, P packed bytes of a row, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from moetier.traces.channels import cost_of_sizes
from moetier.traces.errors import InputError
from moetier.validate.numerics.channels.recovery import recovery_maps
from moetier.validate.numerics.channels.rotation import rotation
from moetier.validate.numerics.channels.ternary import (
    THRESHOLD,
    pack,
    require_finite,
    ternarise,
    unpack,
)
from moetier.validate.numerics.experts import ExpertMatrices


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """How a sketch is made; see `ternary`, `recovery` and `rotation`."""

    rank: int = 0  # of the recovery maps; 0: what is skipped is lost
    group: int | None = None  # inputs that share a scale; None: a whole row
    threshold: float = THRESHOLD
    seed: int = 0  # of the rotation's signs

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """A layer's sketches and recovery maps, as they are stored."""

    gate: Tensor  # (E, I, P) uint8, packed trits of the rotated gate projections
    up: Tensor
    gate_scales: Tensor  # (E, I, G) bfloat16
    up_scales: Tensor
    norms: Tensor  # (E, I) bfloat16, of the columns of the down projections
    left: Tensor  # (E, H, r) bfloat16
    right: Tensor  # (E, I, r) bfloat16

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Sketch:
        """Return the sketch made of *tensors*, which `tensors` returned."""
        return cls(**tensors)

    def estimator(self, used: Tensor, hidden: int, group: int | None) -> Tensor:
        """Return the gate and up projections of the experts *used*, (U, 2I, H), in float32.

        They are what the trits stand for, on rotated inputs.
        """
        return torch.cat(
            [
                _scaled(unpack(self.gate[used], hidden, group), self.gate_scales[used], group),
                _scaled(unpack(self.up[used], hidden, group), self.up_scales[used], group),
            ],
            1,
        )


def make_sketch(experts: ExpertMatrices, settings: ChannelSettings, name: str = "") -> Sketch:
    """Return the sketch of a layer's *experts* (`stacked_matrices`), one expert after the other.

    Raises:
        InputError: If the experts have no gate, the rank is beyond their size, or a weight is not
            finite; *name* says where.
    """
    if experts.gate is None:
        raise InputError(
            "the experts have no gate, so that no channel can be screened",
            where=name or None,
            way_out="use another precision",
        )
    n_hidden, n_channels = experts.down.shape[-2:]
    try:
        cost_of_sizes(n_hidden, n_channels, rank=settings.rank, group=settings.group)
    except InputError as error:
        raise InputError(error.problem, where=name or None, way_out=error.way_out) from None
    turn = rotation(n_hidden, settings.seed)
    made = []
    for e in range(len(experts.up)):
        try:
            gate = ternarise(turn.apply(experts.gate[e]), settings.group, settings.threshold)
            up = ternarise(turn.apply(experts.up[e]), settings.group, settings.threshold)
            down = experts.down[e].float()
            for value in (down, *(bias[e] for bias in experts.biases().values())):
                require_finite(value)
            norms = down.norm(dim=0).to(torch.bfloat16)
            maps = recovery_maps(down, settings.rank)
        except InputError as error:
            where = f"{name} expert {e}".strip()
            raise InputError(error.problem, where=where, way_out=error.way_out) from None
        packed = pack(gate[0], settings.group), pack(up[0], settings.group)
        made.append((*packed, gate[1], up[1], norms, *maps))
    return Sketch(*(torch.stack(column) for column in zip(*made, strict=True)))


def _scaled(trits: Tensor, scales: Tensor, group: int | None) -> Tensor:
    hidden = trits.shape[-1]
    wide = scales.float().repeat_interleave(min(group or hidden, hidden), -1)[..., :hidden]
    return trits * wide
