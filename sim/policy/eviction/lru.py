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
        nbytes, order = self.context.layout.nbytes, self._order
        chosen: list[int] = []
        spared: list[int] = []
        while needed_bytes > 0 and order:
            s, _ = order.popitem(last=False)
            if s in pinned:
                spared.append(s)
            else:
                chosen.append(s)
                needed_bytes -= nbytes[s]
        for s in reversed(spared):  # back to the front, in their old order
            order[s] = None
            order.move_to_end(s, last=False)
        return chosen

    def forget(self, slices: Sequence[int]) -> None:
        for s in slices:
            del self._order[s]
