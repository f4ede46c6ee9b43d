"""This module uses the estimator where the default vectors fail, and those elsewhere.

Speculating Experts (arXiv 2603.19289): the estimator runs on the layers with high drift only. Which
ones is measured: those where it recalls more, on prompts of the training split that are kept from
the fit for early stopping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.traces.predictors import register
from moetier.traces.predictors.base import View, router_operations
from moetier.traces.predictors.estimator import Estimator

if TYPE_CHECKING:
    from torch import Tensor


@register("hybrid")
class Hybrid(Estimator):
    """The estimator on the layers where it recalls more in training, default vectors elsewhere."""

    def __init__(
        self, width: int | None = None, correct: bool = False, layers: list[int] | None = None
    ) -> None:
        """Learn an estimator of *width*; predict with it from MoE layers *layers*, else measured.

        *correct* is the estimator's. A layer here is the one that is predicted from.
        """
        super().__init__(width, correct)
        if layers and min(layers) < 0:
            raise InputError(f"layers {layers} of predictor 'hybrid'", way_out="count from 0")
        self.layers = layers

    def choose(self, estimator: list[float], default: list[float]) -> None:
        """Take the layers where the recall of the *estimator* is above that of the *default*."""
        if self.layers is None:
            pairs = zip(estimator, default, strict=True)
            self.layers = [layer for layer, (mine, other) in enumerate(pairs) if mine > other]
        self.arguments = {**self.arguments, "layers": self.layers}

    def operations(self, geometry: Geometry, horizon: int) -> int:
        """Return the mean operations per layer of both."""
        pairs = max(geometry.n_moe_layers - horizon, 1)
        share = pairs if self.layers is None else len(self.layers)
        default = self.base_operations(geometry) + router_operations(geometry)
        estimator = super().operations(geometry, horizon)
        return (share * estimator + (pairs - share) * default) // pairs

    def logits(self, view: View, horizon: int) -> Tensor:
        """Return the estimator's logits, or the next router's for q."""
        if self.layers is None or view.layer in self.layers:
            return self.trained(view, horizon)
        return view.parts.logits(view.layer + horizon, self.state(view, horizon))
