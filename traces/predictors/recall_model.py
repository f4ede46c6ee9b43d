"""This module stands in for a predictor of which only the recall is published.

The true experts of the later layer are known from the recorded trace; each is kept with the cited
recall, and a lost one is replaced by a wrong expert drawn by popularity. So traces without scores
can be studied; what comes of it rests on the cited figure, and results must say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from moetier.traces.batch import Floats, LayerBatch
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.traces.predictors import register
from moetier.traces.predictors.base import BatchPredictor
from moetier.traces.predictors.history import as_scores, count_experts
from moetier.traces.schema import Header, ScoreKind

PREDICTED_MASS = 0.9
"""The share of the predicted experts together; the others share the rest by popularity."""


@register("recall-model")
class RecallModel(BatchPredictor):
    """True experts at a cited recall per horizon, wrong ones drawn from popularity.

    Errors are independent of each other and of the token, and a predicted expert's rank says
    nothing about whether it is right.
    """

    needs = "future"

    def __init__(self, recall: list[float], seed: int = 0) -> None:
        """Reach *recall*[h - 1] at horizon h; *seed* draws the errors."""
        super().__init__(range(1, len(recall) + 1))
        if any(not 0 <= value <= 1 for value in recall):
            raise InputError(
                f"recall {recall} of predictor 'recall-model'",
                way_out="give one fraction from 0 to 1 per horizon",
            )
        self.recall, self.seed = list(recall), seed
        cited = ", ".join(f"{100 * value:g} %" for value in recall)
        self.assumption = (
            f"predictions are drawn, not made: the true experts at a cited recall of {cited} "
            "(horizon 1, 2, ...), errors independent and drawn from popularity"
        )

    def operations(self, geometry: Geometry, horizon: int) -> int:
        """Return none: what the cited predictor costs is not known to it."""
        return 0

    def start(self, geometry: Geometry, score_kind: ScoreKind) -> None:
        """Begin with all experts equally popular; `prepare` counts."""
        self._geometry = geometry
        self._kind: ScoreKind = score_kind
        self._counts: Any = np.ones((geometry.n_moe_layers, geometry.n_experts))

    def prepare(self, header: Header, batches: Iterable[LayerBatch]) -> None:
        """Count how often each expert is used in *batches*, which is its popularity."""
        for batch in batches:
            self._counts[batch.layer] += count_experts(batch, self._geometry)

    def predict(self, batch: LayerBatch, ahead: Mapping[int, LayerBatch]) -> dict[int, Floats]:
        """Return scores for what is *ahead*."""
        return {
            horizon: self._draw(ahead[horizon], horizon)
            for horizon in self.horizons
            if horizon in ahead and ahead[horizon].n_tokens == batch.n_tokens
        }

    def observe(self, batch: LayerBatch) -> None:
        """Do nothing: popularity is known beforehand."""

    def _draw(self, target: LayerBatch, horizon: int) -> Floats:
        """Return scores (n_tokens, E), the same whatever was drawn before."""
        random = np.random.default_rng([self.seed, target.step, target.layer, horizon])
        n, e = target.n_tokens, self._geometry.n_experts
        popularity = self._counts[target.layer] / self._counts[target.layer].sum()
        true = np.zeros((n, e), bool)
        true[target.token_ids(), target.experts] = True
        kept = true & (random.random((n, e)) < self.recall[horizon - 1])
        lost = (true & ~kept).sum(axis=1)
        # the largest of log p + Gumbel noise are a draw without replacement, in proportion to p
        noise = random.gumbel(size=(n, e)) + np.log(popularity)
        noise[true] = -np.inf
        rank = (-noise).argsort(axis=1).argsort(axis=1)
        predicted = kept | ((rank < lost[:, None]) & ~true)
        favour = np.where(predicted, 1 + random.random((n, e)), 0.0)
        favour *= PREDICTED_MASS / np.maximum(favour.sum(axis=1, keepdims=True), 1e-30)
        rest = np.where(predicted, 0.0, popularity)
        largest = rest.max(axis=1, keepdims=True)
        least = np.where(predicted, favour, np.inf).min(axis=1, keepdims=True)
        room = (1 - PREDICTED_MASS) / np.maximum(rest.sum(axis=1, keepdims=True), 1e-30)
        below = 0.99 * least / np.maximum(largest, 1e-30)
        return as_scores(favour + rest * np.minimum(room, below), self._kind)
