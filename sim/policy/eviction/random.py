"""This module evicts at random: the control every other policy must beat."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from moetier.sim.policy.base import Context, Eviction
from moetier.sim.policy.seams import eviction


@eviction.register("random")
class Random(Eviction):
    """Evict a slice drawn uniformly from what is not pinned, from the run's seed."""

    def start(self, context: Context) -> None:
        super().start(context)
        self._held: list[int] = []
        self._at: dict[int, int] = {}  # slice -> index in _held

    def insert(self, slices: Sequence[int]) -> None:
        for s in slices:
            self._at[s] = len(self._held)
            self._held.append(s)

    def victims(self, needed_bytes: int, pinned: Collection[int]) -> list[int]:
        nbytes, chosen = self.context.layout.nbytes, []
        free = len(self._held) - sum(s in self._at for s in pinned)
        while needed_bytes > 0 and free > 0:
            s = self._held[int(self.context.rng.integers(len(self._held)))]
            if s in pinned:
                continue
            self.forget([s])
            chosen.append(s)
            needed_bytes -= nbytes[s]
            free -= 1
        return chosen

    def forget(self, slices: Sequence[int]) -> None:
        for s in slices:
            at, last = self._at.pop(s), self._held.pop()
            if last != s:  # move the last one into the gap: O(1), order does not matter here
                self._held[at] = last
                self._at[last] = at
