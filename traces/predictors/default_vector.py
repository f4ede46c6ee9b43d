"""This module guesses a layer's output by what its experts put out on average.

Speculating Experts (arXiv 2603.19289): d_l = sum_e w_e DV_l[e], q_l = LN_{l+1}(r_l + d_l), and the
prediction is the next router's answer to q_l. Experts that always run (shared ones) are not in d.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetier.traces.geometry import Geometry
from moetier.traces.predictors import register
from moetier.traces.predictors.base import (
    ModelPredictor,
    Shapes,
    View,
    hidden_of,
    norm_operations,
    router_operations,
)

if TYPE_CHECKING:
    from torch import Tensor

VECTORS = "default_vectors"


class QuasiHidden(ModelPredictor):
    """What predictors share that start from the quasi-hidden state q."""

    guesses = True

    def shapes(self, geometry: Geometry, horizon: int) -> Shapes:
        """Return the default vectors: one per expert of every layer but the last."""
        if horizon != self.horizons[0]:
            return {}
        layers = max(geometry.n_moe_layers - horizon, 0)
        return {VECTORS: (layers, geometry.n_experts, hidden_of(geometry))}

    def state(self, view: View, horizon: int) -> Tensor:
        """Return q (V, H) for the norm of layer `view.layer + horizon`."""
        vectors = self.own(VECTORS, view.layer, view.residual)  # (E, H)
        weights = view.weights.float()
        d = (weights[:, :, None] * vectors[view.ids.long()]).sum(1)  # (V, H)
        stream = (view.residual.float() + d).to(view.residual.dtype)
        return view.parts.norm(view.layer + horizon, stream)

    def base_operations(self, geometry: Geometry) -> int:
        """Return the operations of q: k scaled vectors and a norm."""
        return 2 * geometry.top_k * hidden_of(geometry) + norm_operations(geometry)


@register("default-vector")
class DefaultVector(QuasiHidden):
    """The next router on the quasi-hidden state: residual plus each expert's mean output."""

    def __init__(self, horizons: tuple[int, ...] = (1,)) -> None:
        """Predict for *horizons*, by default the next layer."""
        super().__init__(horizons)

    def operations(self, geometry: Geometry, horizon: int) -> int:
        """Return the operations of q and a router."""
        return self.base_operations(geometry) + router_operations(geometry)

    def logits(self, view: View, horizon: int) -> Tensor:
        """Return the router's logits for q."""
        return view.parts.logits(view.layer + horizon, self.state(view, horizon))
