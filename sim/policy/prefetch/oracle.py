"""This module brings exactly what the next batches need: the bound for every predictor."""

from __future__ import annotations

from collections.abc import Sequence

from moetier.sim.policy.base import Context, Prefetch
from moetier.sim.policy.seams import prefetch
from moetier.traces.batch import LayerBatch
from moetier.traces.registry import Natural, Positive


@prefetch.register("oracle")
class Oracle(Prefetch):
    """Bring what the next *depth* batches need, nearest first, at most *budget* (0: all)."""

    needs_future = True

    def __init__(self, depth: Positive = 1, budget: Natural = 0) -> None:
        self.depth, self.budget = depth, budget

    def start(self, context: Context) -> None:
        super().start(context)
        if context.future is None:
            raise ValueError("the oracle needs the future, which a live source does not have")
        self._future, self._progress = context.future, context.progress

    def candidates(self, batch: LayerBatch, needed: list[int]) -> Sequence[int]:
        now = self._progress.batch
        wanted = [s for ahead in range(1, self.depth + 1) for s in self._future.needed(now + ahead)]
        return wanted[: self.budget] if self.budget else wanted
