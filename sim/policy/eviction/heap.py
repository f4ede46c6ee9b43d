"""This module keeps slices in order of a key that changes as they are used.

It defines the base of the policies that evict the smallest key; it registers nothing itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush

from moetier.sim.policy.base import Context, Eviction

Key = tuple[int, ...]


class HeapEviction(Eviction):
    """Evict the slice with the smallest key, ties by id.

    A changed key is pushed anew and the old entry left to be skipped later, so an update costs
    O(log n); the heap is rebuilt when stale entries outnumber the live ones.
    """

    def start(self, context: Context) -> None:
        """Begin with nothing resident."""
        super().start(context)
        self._key: dict[int, Key] = {}
        self._heap: list[tuple[Key, int]] = []

    def rank(self, slice_id: int, key: Key) -> None:
        """Give a resident slice a new *key*."""
        if self._key.get(slice_id) == key:
            return
        self._key[slice_id] = key
        heappush(self._heap, (key, slice_id))
        if len(self._heap) > 64 + 4 * len(self._key):
            self._heap = [(live, s) for s, live in self._key.items()]
            heapify(self._heap)

    def victims(self, needed_bytes: int, pinned: Collection[int]) -> list[int]:
        """Return, and forget, the smallest keys among what is not pinned."""
        nbytes, chosen, passed = self.context.layout.nbytes, [], []
        while needed_bytes > 0 and self._heap:
            entry = heappop(self._heap)
            key, s = entry
            if self._key.get(s) != key:
                continue  # stale
            if s in pinned:
                passed.append(entry)
                continue
            del self._key[s]
            chosen.append(s)
            needed_bytes -= nbytes[s]
        for entry in passed:
            heappush(self._heap, entry)
        return chosen

    def forget(self, slices: Sequence[int]) -> None:
        """Take note that *slices* left for another reason."""
        for s in slices:
            del self._key[s]
