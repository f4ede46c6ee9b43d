"""This module brings what a predictor says the next layers will need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from moetier.sim.policy.base import Context, Prefetch
from moetier.sim.policy.seams import prefetch
from moetier.traces.batch import LayerBatch
from moetier.traces.gating import GateRule


@prefetch.register("predicted")
class Predicted(Prefetch):
    """Bring the predicted top-k of every token for the next *depth* layers, most likely first.

    Experts are ranked by their predicted probability, summed over the tokens of the batch. A
    *budget* takes that many of the ranking instead, wanted by some token's top-k or not. With
    *cancel* a queued prefetch is withdrawn once its layer has run without it.
    """

    uses_predictions = True

    def __init__(
        self, predictor: str | None = None, depth: int = 1, budget: int = 0, cancel: bool = False
    ) -> None:
        self.predictor, self.depth, self.budget, self.cancel = predictor, depth, budget, cancel
        self.horizons = tuple(range(1, depth + 1))
        self.asks_lateness = cancel

    def candidates(self, batch: LayerBatch, needed: list[int]) -> Sequence[int]:
        found: list[int] = []
        for horizon in self.horizons:
            found += ranked(self.context, batch, horizon, self.budget)
        return found


def ranked(context: Context, batch: LayerBatch, horizon: int, budget: int = 0) -> list[int]:
    """Return the slices that *batch* predicts for *horizon* layers later, most likely first.

    That is the union of its tokens' predicted top-k, or the *budget* likeliest; nothing where there
    is no prediction or no such layer. Of an expert with several parts it is the first part.
    """
    scores, layout, gate = batch.predicted.get(horizon), context.layout, context.gate
    layer = batch.layer + horizon
    if scores is None or layer >= layout.n_layers or gate is None:
        return []
    shares = gate.probabilities(scores).sum(axis=0)
    order = np.argsort(-shares, kind="stable")
    chosen = order[:budget] if budget else _wanted(gate, scores, order)
    return [layout.slice_id(layer, int(expert)) for expert in chosen]


def _wanted(gate: GateRule, scores: np.ndarray, order: np.ndarray) -> Iterator[int]:
    """Yield the experts in *order* that are in the top-k of some token."""
    ids, _ = gate.choose(scores)
    wanted = set(ids.ravel().tolist())
    return (expert for expert in order.tolist() if expert in wanted)
