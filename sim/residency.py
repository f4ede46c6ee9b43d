"""This module keeps the planned residency of one tier and holds it to its capacity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from moetier.sim.layout import Layout
from moetier.sim.policy.base import Eviction


class Cache:
    """The slices planned to be in one tier: what is in flight counts as resident.

    The eviction policy chooses who leaves; the cache checks its choice, so that no policy can pass
    the capacity or remove what is pinned.
    """

    __slots__ = ("_each", "_size", "capacity", "eviction", "resident", "used")

    def __init__(self, layout: Layout, capacity: int, eviction: Eviction) -> None:
        """Start empty with *capacity* bytes, under *eviction*, which the caller starts."""
        self.capacity, self.eviction = capacity, eviction
        self.resident: set[int] = set()
        self.used = 0
        self._size, self._each = layout.size, layout.each

    def insert(self, slices: Sequence[int]) -> None:
        """Add *slices* that are not resident; the capacity is checked by `trim`, not here."""
        self.resident.update(slices)
        self.used += self._each * len(slices) or self._size(slices)
        self.eviction.insert(slices)

    def trim(self, pinned: set[int] | frozenset[int]) -> list[int]:
        """Evict until the tier is within capacity, sparing what is *pinned*; return who left."""
        excess = self.used - self.capacity
        if excess <= 0 or self.eviction.ignores_capacity:
            return []
        victims = self.eviction.victims(excess, pinned)
        if not pinned.isdisjoint(victims):
            self._refuse(pinned, victims)
        self._drop(victims)
        if self.used > self.capacity and not self.resident <= pinned:
            raise RuntimeError(
                f"{type(self.eviction).__name__} evicts {victims}, which leaves "
                f"{self.used - self.capacity} bytes over the capacity, though others could go"
            )
        return victims

    def release(self, needed: Sequence[int], pinned: set[int]) -> list[int]:
        """Let go of what the policy does not keep after a batch that used *needed*."""
        done = self.eviction.release(needed, pinned)
        if done:
            if not pinned.isdisjoint(done):
                self._refuse(pinned, done)
            self._drop(done)
        return done

    def remove(self, slices: Sequence[int]) -> None:
        """Take *slices* out for a reason that is not the policy's."""
        self.eviction.forget(slices)
        self._drop(slices)

    def replace(self, wanted: Sequence[int]) -> tuple[list[int], list[int]]:
        """Make exactly *wanted* resident, least valuable first; return (who left, who came)."""
        keep = set(wanted)
        left = [s for s in sorted(self.resident) if s not in keep]
        came = [s for s in wanted if s not in self.resident]
        self.remove(left)
        self.insert(came)
        self.eviction.touch(wanted)
        return left, came

    def _refuse(self, pinned: set[int] | frozenset[int], leaving: Sequence[int]) -> NoReturn:
        """Say which of those *leaving* are *pinned*."""
        raise RuntimeError(
            f"{type(self.eviction).__name__} evicts {sorted(pinned.intersection(leaving))}, "
            "which are in use"
        )

    def _drop(self, slices: Sequence[int]) -> None:
        """Remove *slices*, which must be resident and named once."""
        left = len(self.resident) - len(slices)
        self.resident.difference_update(slices)
        if len(self.resident) != left:
            raise RuntimeError(
                f"{type(self.eviction).__name__} evicts {list(slices)}, some of which are not "
                "resident or named twice"
            )
        self.used -= self._each * len(slices) or self._size(slices)
