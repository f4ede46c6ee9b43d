"""This module predicts that a request's next token is routed like its last one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from moetier.traces.batch import DECODE, Floats, LayerBatch
from moetier.traces.geometry import Geometry
from moetier.traces.predictors import register
from moetier.traces.predictors.base import BatchPredictor
from moetier.traces.predictors.history import scores_of
from moetier.traces.schema import ScoreKind


@register("previous-token")
class PreviousToken(BatchPredictor):
    """The scores that the later layer gave to the token before, of the same request.

    In a prompt all tokens of a layer run together, so there is no token before: no prediction.
    """

    needs = "past"

    def __init__(self, horizons: tuple[int, ...] = (1,)) -> None:
        """Predict for *horizons*, by default the next layer."""
        super().__init__(horizons)
        self._last: dict[tuple[int, int], Floats] = {}

    def operations(self, geometry: Geometry, horizon: int) -> int:
        """Return none: it only remembers."""
        return 0

    def start(self, geometry: Geometry, score_kind: ScoreKind) -> None:
        """Forget all tokens."""
        self._last = {}

    def predict(self, batch: LayerBatch, ahead: Mapping[int, LayerBatch]) -> dict[int, Floats]:
        """Return the last scores of every token's request, where all of them have some."""
        scores_of(batch)
        if batch.phase != DECODE:
            return {}
        requests = batch.requests or [0] * batch.n_tokens
        made = {}
        for horizon in self.horizons:
            last = [self._last.get((batch.layer + horizon, request)) for request in requests]
            known = [scores for scores in last if scores is not None]
            if known and len(known) == len(last):
                made[horizon] = np.stack(known)
        return made

    def observe(self, batch: LayerBatch) -> None:
        """Remember the scores of every request's last token."""
        requests = batch.requests or [0] * batch.n_tokens
        for request, scores in zip(requests, scores_of(batch), strict=True):
            self._last[batch.layer, request] = scores
