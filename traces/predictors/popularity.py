"""This module predicts the experts that were used most often so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moetier.traces.batch import Floats, LayerBatch
from moetier.traces.geometry import Geometry
from moetier.traces.predictors import register
from moetier.traces.predictors.base import BatchPredictor
from moetier.traces.predictors.history import as_scores, count_experts
from moetier.traces.schema import ScoreKind


@register("popularity")
class Popularity(BatchPredictor):
    """Each layer's experts by how often they were used until now; the same for every token."""

    needs = "past"

    def __init__(self, horizons: tuple[int, ...] = (1,)) -> None:
        """Predict for *horizons*, by default the next layer."""
        super().__init__(horizons)

    def operations(self, geometry: Geometry, horizon: int) -> int:
        """Return the additions of counting."""
        return geometry.top_k

    def start(self, geometry: Geometry, score_kind: ScoreKind) -> None:
        """Forget all counts."""
        self._geometry = geometry
        self._kind: ScoreKind = score_kind
        self._counts: Any = np.zeros((geometry.n_moe_layers, geometry.n_experts), np.int64)

    def predict(self, batch: LayerBatch, ahead: Mapping[int, LayerBatch]) -> dict[int, Floats]:
        """Return the shares counted so far, where a layer was seen before."""
        made = {}
        for horizon in self.horizons:
            layer = batch.layer + horizon
            if layer < len(self._counts) and (total := self._counts[layer].sum()):
                scores = as_scores(self._counts[layer] / total, self._kind)
                made[horizon] = np.broadcast_to(scores, (batch.n_tokens, len(scores)))
        return made

    def observe(self, batch: LayerBatch) -> None:
        """Count what *batch* used."""
        self._counts[batch.layer] += count_experts(batch, self._geometry)
