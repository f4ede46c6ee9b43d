"""This module runs the experts that were predicted, and never asks the router again."""

from __future__ import annotations

from dataclasses import replace

from moetier.sim.policy.base import Context, Routing
from moetier.sim.policy.seams import routing
from moetier.traces.batch import DECODE, Floats, LayerBatch


@routing.register("speculative")
class Speculative(Routing):
    """Run, in decode, the experts predicted one layer earlier, with the predicted weights.

    The first layer follows its router; from then on each prediction starts from what was really
    computed, so errors add up (Speculating Experts, arXiv 2603.19289). Nothing is verified or
    fetched again. On a recorded trace the predictions are those of the undisturbed model.
    """

    alters_output = True
    uses_predictions = True
    replaces_router = True
    horizons = (1,)

    def __init__(self, predictor: str | None = None) -> None:
        self.predictor = predictor

    def start(self, context: Context) -> None:
        super().start(context)
        self._carried: Floats | None = None  # scores predicted for the layer that comes next
        self._due = (-1, -1)  # its step and layer

    def route(self, batch: LayerBatch) -> LayerBatch:
        scores, gate = self._carried, self.context.gate
        if scores is None or gate is None or (batch.step, batch.layer) != self._due:
            return batch
        ids, weights = gate.choose(scores)
        return replace(
            batch,
            experts=ids.ravel().tolist(),
            weights=weights.ravel(),
            tokens=None,
            predicted=batch.predicted,
        )

    def observe(self, batch: LayerBatch) -> None:
        self._carried = batch.predicted.get(1) if batch.phase == DECODE else None
        self._due = (batch.step, batch.layer + 1)
