"""This module evicts the slice that was used last."""

from __future__ import annotations

from collections.abc import Collection

from moetier.sim.policy.eviction.lru import LRU
from moetier.sim.policy.seams import eviction


@eviction.register("mru")
class MRU(LRU):
    """Evict the most recently used slice."""

    def victims(self, needed_bytes: int, pinned: Collection[int]) -> list[int]:
        chosen: list[int] = []
        for s in reversed(self._order):
            if needed_bytes <= 0:
                break
            if s not in pinned:
                chosen.append(s)
                needed_bytes -= self.context.layout.nbytes[s]
        self.forget(chosen)
        return chosen
