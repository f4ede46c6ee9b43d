"""This module predicts and moves nothing: what the predictor itself costs."""

from __future__ import annotations

from moetier.sim.policy.base import Prefetch
from moetier.sim.policy.seams import prefetch
from moetier.traces.registry import Positive


@prefetch.register("predictor-only")
class PredictorOnly(Prefetch):
    """Pay for the predictor's bytes and operations and bring nothing: the control for its cost."""

    uses_predictions = True

    def __init__(self, predictor: str | None = None, depth: Positive = 1) -> None:
        self.predictor = predictor
        self.horizons = tuple(range(1, depth + 1))
