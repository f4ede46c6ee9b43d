"""This module keeps nothing: one buffer for the layer that runs, one for the layer that comes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from moetier.sim.policy.base import Context, Eviction
from moetier.sim.policy.seams import eviction


@eviction.register("double-buffer")
class DoubleBuffer(Eviction):
    """Hold two layer-sized buffers and keep no expert from token to token; ignores capacity.

    As in the offloading runtime of Speculating Experts: while one layer computes from its buffer,
    the other may be filled for the next layer.
    """

    ignores_capacity = True

    def start(self, context: Context) -> None:
        super().start(context)
        self._held: list[dict[int, None]] = [{} for _ in range(context.layout.n_layers)]

    def insert(self, slices: Sequence[int]) -> None:
        layer_of = self.context.layout.layer_of
        for s in slices:
            self._held[layer_of(s)][s] = None

    def victims(self, needed_bytes: int, pinned: Collection[int]) -> list[int]:
        return []

    def release(self, needed: Sequence[int], pinned: Collection[int]) -> list[int]:
        if not needed:
            return []
        done = [s for s in self._held[self.context.layout.layer_of(needed[0])] if s not in pinned]
        self.forget(done)
        return done

    def forget(self, slices: Sequence[int]) -> None:
        layer_of = self.context.layout.layer_of
        for s in slices:
            del self._held[layer_of(s)][s]
