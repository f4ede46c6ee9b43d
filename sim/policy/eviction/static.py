"""This module keeps a fixed set of slices; everything else only passes through."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from moetier.sim.policy.base import Context, Eviction
from moetier.sim.policy.popularity import hottest
from moetier.sim.policy.seams import eviction


@eviction.register("static")
class Static(Eviction):
    """Keep the slices a profile trace used most; a missed slice passes through and is not kept.

    Without a profile the first experts of every layer are kept, as in a split by expert index.
    Combine it with `warmup: static` to have the set resident from the start; otherwise it fills on
    first use.
    """

    needs_popularity = True

    def start(self, context: Context) -> None:
        super().start(context)
        self._kept = set(hottest(context))
        self._passing: dict[int, None] = {}

    def insert(self, slices: Sequence[int]) -> None:
        for s in slices:
            if s not in self._kept:
                self._passing[s] = None

    def victims(self, needed_bytes: int, pinned: Collection[int]) -> list[int]:
        """Give up what passes through, then others that warm-up may have brought."""
        nbytes, chosen = self.context.layout.nbytes, []
        others = (s for s in sorted(self.context.resident) if s not in self._passing)
        for s in (*self._passing, *others):
            if needed_bytes <= 0:
                break
            if s not in pinned:
                chosen.append(s)
                needed_bytes -= nbytes[s]
        self.forget(chosen)
        return chosen

    def release(self, needed: Sequence[int], pinned: Collection[int]) -> list[int]:
        done = [s for s in needed if s in self._passing and s not in pinned]
        self.forget(done)
        return done

    def forget(self, slices: Sequence[int]) -> None:
        for s in slices:
            self._passing.pop(s, None)
