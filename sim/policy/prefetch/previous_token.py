"""This module bets that the next layer will use what it used for the previous token."""

from __future__ import annotations

from collections.abc import Sequence

from moetier.sim.policy.base import Context, Prefetch
from moetier.sim.policy.seams import prefetch
from moetier.traces.batch import LayerBatch
from moetier.traces.registry import Natural, Positive


@prefetch.register("previous-token")
class PreviousToken(Prefetch):
    """Bring, for the next *depth* layers, the slices their last batch used.

    At most *budget* slices a layer (0: all). After the last layer comes the first of the next step.
    With *cancel* a queued prefetch is withdrawn once its layer has run without it.
    """

    def __init__(self, depth: Positive = 1, budget: Natural = 0, cancel: bool = False) -> None:
        self.depth, self.budget, self.cancel = depth, budget, cancel
        self.asks_lateness = cancel

    def start(self, context: Context) -> None:
        super().start(context)
        self.depth = min(self.depth, context.layout.n_layers)
        self._last: list[list[int]] = [[] for _ in range(context.layout.n_layers)]

    def candidates(self, batch: LayerBatch, needed: list[int]) -> Sequence[int]:
        last, layer = self._last, batch.layer
        last[layer] = needed
        if self.depth == 1 and not self.budget:
            return last[(layer + 1) % len(last)]
        most = self.budget or None
        return [
            s
            for ahead in range(1, self.depth + 1)
            for s in last[(layer + ahead) % len(last)][:most]
        ]
