"""This module counts the bytes that a batch really read, beside the target.

Shapes: T tokens, K experts per token, I channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moetier.traces.channels import ChannelCost


@dataclass(frozen=True, slots=True)
class Reads:
    """Bytes read of routed experts, and what reading the same experts whole would have taken."""

    read_bytes: int = 0
    full_bytes: int = 0

    def __add__(self, other: Reads) -> Reads:
        """Return both together."""
        return Reads(self.read_bytes + other.read_bytes, self.full_bytes + other.full_bytes)

    @property
    def share(self) -> float | None:
        """Return the share that was read; None where nothing was routed."""
        return self.read_bytes / self.full_bytes if self.full_bytes else None


def batch_reads(cost: ChannelCost, ids: Tensor, kept: Tensor) -> Reads:
    """Return the reads of one batch of one layer, each expert's channels read once.

    *ids* are (T, K) and *kept*, (T, K, I), is what `ChannelExperts.forward` returned.
    """
    used, which = torch.unique(ids.flatten(), return_inverse=True)
    counts = torch.zeros(len(used), kept.shape[-1], dtype=torch.int64)
    counts.index_add_(0, which, kept.flatten(0, 1).long())
    union = (counts > 0).sum(1).tolist()  # channels of each expert
    return Reads(
        read_bytes=sum(cost.read_bytes(count) for count in union),
        full_bytes=len(used) * cost.full_bytes,
    )
