"""This module evicts the slice that came first."""

from __future__ import annotations

from collections.abc import Sequence

from moetier.sim.policy.eviction.lru import LRU
from moetier.sim.policy.seams import eviction


@eviction.register("fifo")
class FIFO(LRU):
    """Evict the slice that has been resident longest, used or not."""

    def touch(self, slices: Sequence[int]) -> None:
        """Ignore use: only arrival counts."""
