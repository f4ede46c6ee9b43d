"""This module evicts LSB slices before any MSB slice."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from moetier.sim.layout import LSB
from moetier.sim.policy.base import Context, Eviction
from moetier.sim.policy.eviction.lru import LRU
from moetier.sim.policy.seams import eviction


@eviction.register("slice-aware")
class SliceAware(Eviction):
    """Evict LSB slices first, least recently used first, then MSB slices likewise.

    After SliceMoE (arXiv 2512.12990), where an LSB slice leaves as soon as it has been used: with
    *keep_lsb* false one does, and else only when its room is wanted.
    """

    needs_bit_slices = True

    def __init__(self, keep_lsb: bool = True) -> None:
        self.keep_lsb = keep_lsb

    def start(self, context: Context) -> None:
        super().start(context)
        self._msb, self._lsb = LRU(), LRU()
        for part in (self._msb, self._lsb):
            part.start(context)

    def insert(self, slices: Sequence[int]) -> None:
        msb, lsb = _apart(slices)
        self._msb.insert(msb)
        self._lsb.insert(lsb)

    def touch(self, slices: Sequence[int]) -> None:
        msb, lsb = _apart(slices)
        self._msb.touch(msb)
        self._lsb.touch(lsb)

    def victims(self, needed_bytes: int, pinned: Collection[int]) -> list[int]:
        chosen = self._lsb.victims(needed_bytes, pinned)
        needed_bytes -= self.context.layout.size(chosen)
        return chosen + self._msb.victims(needed_bytes, pinned)

    def release(self, needed: Sequence[int], pinned: Collection[int]) -> list[int]:
        if self.keep_lsb:
            return []
        there = self.context.resident
        done = [s for s in needed if s & LSB and s in there and s not in pinned]
        self._lsb.forget(done)
        return done

    def forget(self, slices: Sequence[int]) -> None:
        msb, lsb = _apart(slices)
        self._msb.forget(msb)
        self._lsb.forget(lsb)


def _apart(slices: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the MSB and the LSB slices: those of even and of odd ids."""
    return [s for s in slices if not s & LSB], [s for s in slices if s & LSB]
