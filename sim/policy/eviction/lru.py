"""This module evicts the slice whose last use is longest ago."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from moetier.sim.policy.base import Context, Eviction
from moetier.sim.policy.seams import eviction


@eviction.register("lru")
class LRU(Eviction):
    """Evict the least recently used slice, over all layers together."""

    def start(self, context: Context) -> None:
        super().start(context)
        self._order: OrderedDict[int, None] = OrderedDict()  # oldest first

    def insert(self, slices: Sequence[int]) -> None:
        order = self._order
        for s in slices:
            order[s] = None

    def touch(self, slices: Sequence[int]) -> None:
        move = self._order.move_to_end
        for s in slices:
            move(s)

    def victims(self, needed_bytes: int, pinned: Collection[int]) -> list[int]:
        nbytes, chosen = self.context.layout.nbytes, []
        for s in self._order:
            if needed_bytes <= 0:
                break
            if s not in pinned:
                chosen.append(s)
                needed_bytes -= nbytes[s]
        self.forget(chosen)
        return chosen

    def forget(self, slices: Sequence[int]) -> None:
        for s in slices:
            del self._order[s]
