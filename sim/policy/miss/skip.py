"""This module leaves out a missing expert."""

from __future__ import annotations

from moetier.sim.policy.base import Miss, Missed
from moetier.sim.policy.seams import miss
from moetier.sim.policy.whole import absent
from moetier.traces.batch import DECODE, LayerBatch
from moetier.traces.registry import Natural


@miss.register("skip")
class Skip(Miss):
    """Leave out a missed expert in decode; prefill fetches.

    With *renormalise* the weights of the token's remaining experts are scaled up to their old sum.
    The first *keep* of a batch's missed experts, in slot order, are fetched all the same, so that a
    cold cache fills. So is what is missing of an expert that is there in part.
    """

    alters_output = True

    def __init__(self, renormalise: bool = False, keep: Natural = 0) -> None:
        self.renormalise, self.keep = renormalise, keep

    def resolve(self, missing: list[int], batch: LayerBatch) -> Missed:
        if batch.phase != DECODE:
            return Missed(missing)
        gone, expert_of = absent(self.context, missing), self.context.layout.expert_of
        if self.keep:
            kept = list(dict.fromkeys(map(expert_of, gone)))[: self.keep]
            gone = [s for s in gone if expert_of(s) not in kept]
        left_out = set(gone)
        return Missed([s for s in missing if s not in left_out], skip=gone)
