"""This module knows the future of a recorded run, for oracles only."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Future:
    """The unique slices of every batch of a run, and when each is used next.

    Times are batch indices. `never` (the number of batches) stands for no further use. Memory is 8
    bytes per lookup and table, so an oracle over a very long trace costs gigabytes.
    """

    def __init__(self, needed: Iterable[list[int]]) -> None:
        """Record *needed*, the unique slices of each batch in order."""
        lists = list(needed)
        counts = np.fromiter(map(len, lists), np.int64, len(lists))
        self.never = len(lists)
        self._start: Ints = np.concatenate(([0], np.cumsum(counts)))
        self._slices: Ints = np.fromiter(chain.from_iterable(lists), np.int64, int(self._start[-1]))
        batch = np.repeat(np.arange(len(lists)), counts)
        order = np.lexsort((batch, self._slices))
        after = np.full(len(order), self.never)
        same = self._slices[order[:-1]] == self._slices[order[1:]]
        after[:-1][same] = batch[order[1:]][same]
        self._next: Ints = np.empty(len(order), np.int64)
        self._next[order] = after

    def needed(self, batch: int) -> list[int]:
        """Return the unique slices of *batch*; none for a batch beyond the end."""
        if batch >= self.never:
            return []
        found: list[int] = self._slices[self._start[batch] : self._start[batch + 1]].tolist()
        return found

    def next_uses(self, batch: int) -> dict[int, int]:
        """Return the next batch that uses each slice of *batch* again; {} before the first."""
        if batch < 0:
            return {}
        span = slice(self._start[batch], self._start[batch + 1])
        return dict(zip(self._slices[span].tolist(), self._next[span].tolist(), strict=True))

    def next_use(self, slice_id: int, after: int) -> int:
        """Return the first batch later than *after* that uses *slice_id*."""
        uses = self._uses.get(slice_id)
        if uses is None:
            return self.never
        at = bisect_right(uses, after)
        return uses[at] if at < len(uses) else self.never

    @cached_property
    def _uses(self) -> dict[int, list[int]]:
        batch = np.repeat(np.arange(self.never), np.diff(self._start))
        order = np.argsort(self._slices, kind="stable")
        slices, first = np.unique(self._slices[order], return_index=True)
        groups = np.split(batch[order], first[1:])
        # Nothing at all splits into one empty group.
        return {s: g.tolist() for s, g in zip(slices.tolist(), groups, strict=False)}
