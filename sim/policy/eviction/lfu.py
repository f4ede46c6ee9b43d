"""This module evicts the slice that was used least often."""

from __future__ import annotations

from collections.abc import Sequence

from moetier.sim.policy.base import Context
from moetier.sim.policy.eviction.heap import HeapEviction
from moetier.sim.policy.seams import eviction


@eviction.register("lfu")
class LFU(HeapEviction):
    """Evict the least frequently used slice; among equals the least recently used.

    With *remember* (the default) a slice keeps its count after it was evicted, so a popular expert
    that comes back is not the next to go; without it the count starts anew.
    """

    def __init__(self, remember: bool = True) -> None:
        self.remember = remember

    def start(self, context: Context) -> None:
        super().start(context)
        self._count = [0] * len(context.layout.nbytes)
        self._clock = 0

    def insert(self, slices: Sequence[int]) -> None:
        for s in slices:
            if not self.remember:
                self._count[s] = 0
            self._rank(s)

    def touch(self, slices: Sequence[int]) -> None:
        for s in slices:
            self._count[s] += 1
            self._rank(s)

    def _rank(self, s: int) -> None:
        self._clock += 1
        self.rank(s, (self._count[s], self._clock))
