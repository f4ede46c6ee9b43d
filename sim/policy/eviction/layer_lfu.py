"""This module shares the capacity fairly between layers and evicts by use within them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from moetier.sim.policy.base import Context, Eviction
from moetier.sim.policy.seams import eviction


@eviction.register("layer-lfu")
class LayerLFU(Eviction):
    """Evict the least frequently used slice of the layer that holds the most bytes.

    The capacity thus settles to an equal share per layer, whatever the order of use; counts are
    kept after eviction, ties go to the least recently used. Layers run in a fixed cycle, so a
    shared order of recency would always evict the layer that is needed soonest.
    """

    def start(self, context: Context) -> None:
        super().start(context)
        layout = context.layout
        self._count = [0] * len(layout.nbytes)
        self._last = [0] * len(layout.nbytes)
        self._clock = 0
        self._held: list[set[int]] = [set() for _ in range(layout.n_layers)]
        self._bytes = [0] * layout.n_layers

    def insert(self, slices: Sequence[int]) -> None:
        layout = self.context.layout
        for s in slices:
            layer = layout.layer_of(s)
            self._held[layer].add(s)
            self._bytes[layer] += layout.nbytes[s]
            self._mark(s)

    def touch(self, slices: Sequence[int]) -> None:
        for s in slices:
            self._count[s] += 1
            self._mark(s)

    def victims(self, needed_bytes: int, pinned: Collection[int]) -> list[int]:
        chosen: list[int] = []
        nbytes = self.context.layout.nbytes
        layers = list(range(len(self._held)))
        while needed_bytes > 0 and layers:
            layer = max(layers, key=lambda at: (self._bytes[at], -at))
            free = [s for s in self._held[layer] if s not in pinned]
            if not free:
                layers.remove(layer)
                continue
            victim = min(free, key=lambda s: (self._count[s], self._last[s]))
            self.forget([victim])
            chosen.append(victim)
            needed_bytes -= nbytes[victim]
        return chosen

    def forget(self, slices: Sequence[int]) -> None:
        layout = self.context.layout
        for s in slices:
            layer = layout.layer_of(s)
            self._held[layer].remove(s)
            self._bytes[layer] -= layout.nbytes[s]

    def _mark(self, s: int) -> None:
        self._clock += 1
        self._last[s] = self._clock
