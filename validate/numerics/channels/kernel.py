"""This module runs `ChannelExperts` as a kernel that skips the reads: one core, compiled by numba.

Importing it without numba raises `InputError`. It keeps its own copy of the weights, one record per
channel (gate row, up row, down column), so that what a channel needs is one piece of memory.

Shapes: T tokens, K experts per token, A = T * K, E experts, H hidden, I channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moetier.traces.errors import InputError
from moetier.validate.numerics.channels.experts import ChannelExperts, ChannelOutput
from moetier.validate.numerics.channels.gating import KINDS, Gating
from moetier.validate.numerics.channels.keep import Keep, Threshold, TopK
from moetier.validate.numerics.channels.kernel_code import block, dense_block

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class ChannelKernel:
    """A layer's experts laid out for the compiled kernel; `of` makes one."""

    signs: Array
    turn: int
    packed: tuple[Array, Array]
    scales: tuple[Array, Array]
    norms: Array
    maps: tuple[Array, Array]
    records: Array
    biases: tuple[Array, Array, Array]
    gating: tuple[int, float, float]

    @classmethod
    def of(cls, channels: ChannelExperts, gating: Gating) -> ChannelKernel:
        """Return the kernel of *channels*, whose experts compute *gating*.

        Raises:
            InputError: If they have a norm after the experts, sketches with several scales per
                row, or weights other than bfloat16 and float32.
        """
        m, s = channels.matrices, channels.sketch
        if m.gate is None or m.post_norm is not None:
            raise InputError(
                "the kernel has no norm after experts, and none without a gate",
                way_out="use ChannelExperts.forward",
            )
        if s.gate_scales.shape[-1] > 1:
            raise InputError(
                f"the kernel has one scale per row, not {s.gate_scales.shape[-1]}",
                way_out="make the sketch without groups, or use ChannelExperts.forward",
            )
        empty = torch.empty(0, 0)
        parts = (m.gate_bias, m.up_bias, m.down_bias)
        first, second, third = (empty if part is None else part.float() for part in parts)
        limit = np.inf if gating.limit is None else gating.limit
        return cls(
            signs=channels.rotation.signs.numpy(),
            turn=channels.rotation.block,
            packed=(_plain(s.gate), _plain(s.up)),
            scales=(_plain(s.gate_scales[..., 0]), _plain(s.up_scales[..., 0])),
            norms=_plain(s.norms),
            maps=(_plain(s.left.mT), _plain(s.right)),
            records=_plain(torch.cat([m.gate, m.up, m.down.mT], -1)),
            biases=(_plain(first), _plain(second), _plain(third)),
            gating=(KINDS.index(gating.kind), gating.alpha, limit),
        )

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        keep: Keep,
        *,
        union: bool = False,
    ) -> ChannelOutput:
        """Return what `ChannelExperts.forward` does, but for rounding.

        Raises:
            InputError: If *keep* is neither `TopK` nor `Threshold`: an expert's channels are chosen
                before the next expert is screened.
        """
        if not isinstance(keep, TopK | Threshold):
            raise InputError(
                f"the kernel cannot keep by {type(keep).__name__}",
                way_out="use TopK or Threshold, or ChannelExperts.forward",
            )
        order, rows = _sorted(x, ids, weights)
        out = np.zeros(x.shape, np.float32)
        kept = np.zeros((ids.numel(), self.norms.shape[1]), np.bool_)
        k, least = (keep.k, 0.0) if isinstance(keep, TopK) else (-1, keep.least)
        block(
            *rows,
            k,
            least,
            union,
            self.signs,
            self.turn,
            self.packed,
            self.scales,
            self.norms,
            self.maps,
            self.records,
            self.biases,
            self.gating,
            out,
            kept,
        )
        back = np.empty_like(kept)
        back[order] = kept
        return ChannelOutput(
            torch.from_numpy(out).to(x.dtype),
            torch.from_numpy(back).view(*ids.shape, back.shape[1]),
        )

    def dense(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return what the experts make of *x*, (T, H), with every channel and no screening.

        Raises:
            InputError: If they have biases.
        """
        if self.biases[0].size:
            raise InputError("the dense block has no biases", way_out="keep all channels instead")
        _, rows = _sorted(x, ids, weights)
        out = np.zeros(x.shape, np.float32)
        dense_block(*rows, self.records, self.gating, out)
        return torch.from_numpy(out).to(x.dtype)


def _sorted(
    x: Tensor, ids: Tensor, weights: Tensor
) -> tuple[Array, tuple[Array, Array, Array, Array, Array]]:
    """Return the order of assignments by expert, and what the compiled code takes of a batch."""
    flat = ids.reshape(-1).numpy()
    order = np.argsort(flat, kind="stable")
    experts, first = np.unique(flat[order], return_index=True)
    return order, (
        x.float().contiguous().numpy(),
        experts,
        np.append(first, len(flat)),
        order // ids.shape[1],
        weights.reshape(-1).float().numpy()[order],
    )


def _plain(value: Tensor) -> Array:
    """Return *value* in numpy, contiguous; bfloat16 as its bits."""
    value = value.contiguous()
    if value.dtype == torch.bfloat16:
        bits: Array = value.view(torch.int16).numpy().view(np.uint16)
        return bits
    if value.dtype not in (torch.float32, torch.uint8):
        raise InputError(
            f"the kernel has no weights of {value.dtype}", way_out="use bfloat16 or float32"
        )
    plain: Array = value.numpy()
    return plain
