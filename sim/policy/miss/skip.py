"""This module leaves out a missing expert."""

from __future__ import annotations

from moetier.sim.policy.base import Miss, Missed
from moetier.sim.policy.seams import miss
from moetier.traces.batch import DECODE, LayerBatch
from moetier.traces.registry import Natural


@miss.register("skip")
class Skip(Miss):
    """Leave out a missed expert in decode; prefill fetches.

    With *renormalise* the weights of the token's remaining experts are scaled up to their old sum.
    At least *keep* of a batch's missing slices, in slot order, are fetched all the same, so that a
    cold cache fills.
    """

    alters_output = True

    def __init__(self, renormalise: bool = False, keep: Natural = 0) -> None:
        self.renormalise, self.keep = renormalise, keep

    def resolve(self, missing: list[int], batch: LayerBatch) -> Missed:
        if batch.phase != DECODE:
            return Missed(missing)
        return Missed(missing[: self.keep], skip=missing[self.keep :])
