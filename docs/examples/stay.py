"""This module predicts that the next layer uses the experts with the ids that this one used."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from moetier.traces.batch import Floats, LayerBatch
from moetier.traces.geometry import Geometry
from moetier.traces.predictors import register
from moetier.traces.predictors.base import BatchPredictor
from moetier.traces.predictors.history import as_scores, count_experts
from moetier.traces.schema import ScoreKind


@register("stay")
class Stay(BatchPredictor):
    """The next layers' experts by how often this batch used those of the same id."""

    needs = "past"

    def __init__(self, horizons: tuple[int, ...] = (1,)) -> None:
        """Predict for *horizons*, by default the next layer."""
        super().__init__(horizons)

    def operations(self, geometry: Geometry, horizon: int) -> int:
        """Return the additions of counting."""
        return geometry.top_k

    def start(self, geometry: Geometry, score_kind: ScoreKind) -> None:
        """Take note of the sizes; there is nothing to forget."""
        self._geometry = geometry
        self._kind: ScoreKind = score_kind

    def predict(self, batch: LayerBatch, ahead: Mapping[int, LayerBatch]) -> dict[int, Floats]:
        """Return the shares of this batch, the same for all of its tokens and horizons."""
        counts = count_experts(batch, self._geometry)
        scores = as_scores(counts / counts.sum(), self._kind)
        made = np.broadcast_to(scores, (batch.n_tokens, len(scores)))
        beyond = self._geometry.n_moe_layers - batch.layer
        return {horizon: made for horizon in self.horizons if horizon < beyond}

    def observe(self, batch: LayerBatch) -> None:
        """Learn nothing."""
