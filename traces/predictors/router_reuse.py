"""This module asks the next router about the present residual: the FATE-style baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetier.traces.geometry import Geometry
from moetier.traces.predictors import register
from moetier.traces.predictors.base import (
    ModelPredictor,
    View,
    norm_operations,
    router_operations,
)

if TYPE_CHECKING:
    from torch import Tensor


@register("router-reuse")
class RouterReuse(ModelPredictor):
    """The later layer's own norm and router, on the residual as it is now."""

    def __init__(self, horizons: tuple[int, ...] = (1,)) -> None:
        """Predict for *horizons*, by default the next layer."""
        super().__init__(horizons)

    def operations(self, geometry: Geometry, horizon: int) -> int:
        """Return the operations of a norm and a router."""
        return norm_operations(geometry) + router_operations(geometry)

    def state(self, view: View, horizon: int) -> Tensor:
        """Return LN_{l+h}(r_l)."""
        return view.parts.norm(view.layer + horizon, view.residual)

    def logits(self, view: View, horizon: int) -> Tensor:
        """Return the router's logits for that."""
        return view.parts.logits(view.layer + horizon, self.state(view, horizon))
