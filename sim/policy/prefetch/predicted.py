"""This module brings what a predictor says the next layers will need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from moetier.sim.policy.base import Context, Prefetch
from moetier.sim.policy.seams import prefetch
from moetier.traces.batch import LayerBatch
from moetier.traces.registry import Natural, Positive

_AT_ONCE = 16  # experts turned into integers at a time: a caller may stop at the first few


@prefetch.register("predicted")
class Predicted(Prefetch):
    """Bring the predicted top-k of every token for the next *depth* layers, most likely first.

    Experts are ranked by their predicted probability, summed over the tokens of the batch. A
    *budget* takes that many of the ranking instead, wanted by some token's top-k or not. With
    *cancel* a queued prefetch is withdrawn once its layer has run without it.
    """

    uses_predictions = True

    def __init__(
        self,
        predictor: str | None = None,
        depth: Positive = 1,
        budget: Natural = 0,
        cancel: bool = False,
    ) -> None:
        self.predictor, self.depth, self.budget, self.cancel = predictor, depth, budget, cancel
        self.horizons = tuple(range(1, depth + 1))
        self.asks_lateness = cancel

    def candidates(self, batch: LayerBatch, needed: list[int]) -> Sequence[int]:
        return [s for h in self.horizons for s in ranked(self.context, batch, h, self.budget)]


def ranked(
    context: Context, batch: LayerBatch, horizon: int, budget: int | None = 0
) -> Iterator[int]:
    """Yield the slices that *batch* predicts for *horizon* layers later, most likely first.

    That is the union of its tokens' predicted top-k, or the *budget* likeliest (None: all experts);
    nothing where there is no prediction or no such layer. Of an expert with several parts it is the
    first part.
    """
    scores, layout, gate = batch.predicted.get(horizon), context.layout, context.gate
    layer = batch.layer + horizon
    if scores is None or layer >= layout.n_layers or gate is None:
        return
    # One token's scores rank as its probabilities do; several tokens' have to be added up.
    shares = scores[0] if len(scores) == 1 else gate.probabilities(scores).sum(axis=0)
    order = (-shares).argsort(kind="stable")  # the function np.argsort takes twice as long
    if budget != 0:
        order = order[:budget]
    elif len(scores) == 1:
        order = order[: gate.top_k]
    else:
        wanted = np.zeros(len(order), bool)
        wanted[gate.choose(scores)[0]] = True
        order = order[wanted[order]]
    first, parts = layer * layout.layer_slices, layout.n_parts
    for begin in range(0, len(order), _AT_ONCE):
        for expert in order[begin : begin + _AT_ONCE].tolist():
            yield first + expert * parts
