"""This module brings what a predictor says the next layers will need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from math import inf

from moetier.sim.policy.base import Context, Prefetch
from moetier.sim.policy.seams import prefetch
from moetier.traces.batch import Floats, LayerBatch
from moetier.traces.gating import GateRule
from moetier.traces.registry import Natural, Positive

_ONE_BY_ONE = 16  # experts looked for before the rest are sorted


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
    """Return the slices that *batch* predicts for *horizon* layers later, most likely first.

    That is the union of its tokens' predicted top-k, or the *budget* likeliest (None: all experts);
    nothing where there is no prediction or no such layer. Of an expert with several parts it is the
    first part; of one in blocks, all of them.
    """
    scores, layout, gate = batch.predicted.get(horizon), context.layout, context.gate
    layer = batch.layer + horizon
    if scores is None or layer >= layout.n_layers or gate is None:
        return iter(())
    found = _firsts(scores, gate, layer * layout.layer_slices, layout.n_parts, budget)
    if layout.blocks:
        return (s for first in found for s in range(first, first + layout.n_parts))
    return found


def _firsts(
    scores: Floats, gate: GateRule, first: int, parts: int, budget: int | None
) -> Iterator[int]:
    """Yield the first slices of what *scores* rank, in a layer whose own first slice is *first*."""
    if len(scores) == 1:  # one token's scores rank as its probabilities do
        order = _descending(scores[0], first, parts)
        return order if budget is None else islice(order, budget or gate.top_k)
    order = _descending(gate.probabilities(scores).sum(axis=0), first, parts)
    if budget != 0:
        return order if budget is None else islice(order, budget)
    wanted = {first + expert * parts for expert in gate.choose(scores)[0].ravel().tolist()}
    return filter(wanted.__contains__, order)


def _descending(shares: Floats, first: int, step: int) -> Iterator[int]:
    """Yield `first + expert * step` by falling share, ties to the lower index, NaN last.

    Most callers stop after a few. These are found one by one: sorting a hundred takes longer than
    looking ten times for the largest.
    """
    left, found = shares.copy(), 0
    largest, value = left.argmax, left.item
    while found < _ONE_BY_ONE:
        at = int(largest())
        if not value(at) > -inf:  # nothing left, or something that only sorting can place
            break
        left[at] = -inf
        found += 1
        yield first + at * step
    for at in (-shares).argsort(kind="stable")[found:].tolist():
        yield first + at * step
