"""This module computes a missing expert where it is."""

from __future__ import annotations

from collections import Counter

from moetier.sim.policy.base import Miss, Missed
from moetier.sim.policy.seams import miss
from moetier.sim.policy.whole import absent
from moetier.traces.batch import LayerBatch
from moetier.traces.registry import Natural


@miss.register("cpu")
class Cpu(Miss):
    """Run a missed expert on the processor of the next tier, while the hits run on the first.

    An expert with more than *max_tokens* tokens in the batch is fetched instead: computing then
    costs more than moving (0: no limit). So is what is missing of an expert that is there in part.
    """

    computes_below = True

    def __init__(self, max_tokens: Natural = 0) -> None:
        self.max_tokens = max_tokens

    def resolve(self, missing: list[int], batch: LayerBatch) -> Missed:
        below = absent(self.context, missing)
        if self.max_tokens and batch.n_tokens > self.max_tokens:
            tokens, expert_of = Counter(batch.experts), self.context.layout.expert_of
            below = [s for s in below if tokens[expert_of(s)] <= self.max_tokens]
        stays = set(below)
        return Missed([s for s in missing if s not in stays], cpu=below)
