"""This module evicts with knowledge of the future: the bound no online policy can pass."""

from __future__ import annotations

from collections.abc import Sequence

from moetier.sim.policy.base import Context
from moetier.sim.policy.eviction.heap import HeapEviction
from moetier.sim.policy.seams import eviction


@eviction.register("belady")
class Belady(HeapEviction):
    """Evict the slice whose next use is furthest away (Belady 1966).

    Optimal for demand fetching of slices of one size; for mixed sizes a bound in name only, since
    the exact optimum is NP-hard.
    """

    needs_future = True

    def start(self, context: Context) -> None:
        super().start(context)
        if context.future is None:
            raise ValueError("belady needs the future, which a live source does not have")
        self._future, self._progress = context.future, context.progress

    def insert(self, slices: Sequence[int]) -> None:
        now = self._progress.batch
        after = self._future.next_uses(now)
        for s in slices:  # warmed up or prefetched ones are not in the batch
            self.rank(s, (-after[s] if s in after else -self._future.next_use(s, now),))

    def touch(self, slices: Sequence[int]) -> None:
        self.insert(slices)
