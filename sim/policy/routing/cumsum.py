"""This module prefers cached experts among those that hold most of the router's probability."""

from __future__ import annotations

import numpy as np

from moetier.sim.policy.base import Routing
from moetier.sim.policy.routing.rerouting import (
    cached_experts,
    ranking,
    rerouted,
    router_choice,
    scores_of,
)
from moetier.sim.policy.seams import routing
from moetier.traces.batch import DECODE, LayerBatch
from moetier.traces.registry import Share


@routing.register("cumsum")
class Cumsum(Routing):
    """Run, in decode, cached experts first out of the likeliest that together reach *mass*.

    The candidates of a token are its smallest set of likeliest experts whose probabilities add up
    to *mass*, and at least as many as it needs; cached ones go first, then likelier ones. What is
    chosen is weighed by the original scores (the cumulative-probability variant of
    cache-conditional experts, arXiv 2412.00099).

    Scores that are no probabilities are made some: logits by softmax, sigmoids by their sum, a bias
    that takes part in the choice included; what a bias makes negative counts as nothing.
    """

    needs_scores = True
    follows_cache = True

    def __init__(self, mass: Share = 0.9) -> None:
        self.mass = mass
        self.alters_output = mass > 0  # else the candidates are the router's own choice

    def route(self, batch: LayerBatch) -> LayerBatch:
        gate = self.context.gate
        if batch.phase != DECODE or not self.alters_output or gate is None:
            return batch
        scores = scores_of(batch)
        shares = np.maximum(gate.probabilities(scores).astype(np.float64), 0)
        chosen = router_choice(batch, shares.shape[1])
        likeliest = ranking(chosen, -shares)
        reached = np.take_along_axis(shares, likeliest, axis=1).cumsum(axis=1)
        short = (reached < self.mass * reached[:, -1:]).sum(axis=1)
        count = np.maximum(short + 1, chosen.sum(axis=1))
        outside = np.ones_like(chosen)
        np.put_along_axis(outside, likeliest, np.arange(shares.shape[1]) >= count[:, None], axis=1)
        absent = np.broadcast_to(~cached_experts(self.context, batch.layer), shares.shape)
        return rerouted(batch, gate, scores, ranking(chosen, outside, absent, -shares))
