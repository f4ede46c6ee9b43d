"""This module computes a missing expert where it is."""

from __future__ import annotations

from collections import Counter

from moetier.sim.policy.base import Miss, Missed
from moetier.sim.policy.seams import miss
from moetier.traces.batch import LayerBatch
from moetier.traces.registry import Natural


@miss.register("cpu")
class Cpu(Miss):
    """Run a missed expert on the processor of the next tier, while the hits run on the first.

    An expert with more than *max_tokens* tokens in the batch is fetched instead: computing then
    costs more than moving (0: no limit).
    """

    computes_below = True

    def __init__(self, max_tokens: Natural = 0) -> None:
        self.max_tokens = max_tokens

    def resolve(self, missing: list[int], batch: LayerBatch) -> Missed:
        if not self.max_tokens or batch.n_tokens <= self.max_tokens:
            return Missed([], cpu=missing)
        tokens = Counter(batch.experts)
        expert_of = self.context.layout.expert_of
        few = [s for s in missing if tokens[expert_of(s)] <= self.max_tokens]
        kept = set(few)
        return Missed([s for s in missing if s not in kept], cpu=few)
