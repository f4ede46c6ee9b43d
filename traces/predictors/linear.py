"""This module learns one linear map per pair of layers: the single-layer baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetier.traces.geometry import Geometry
from moetier.traces.predictors import register
from moetier.traces.predictors.base import ModelPredictor, Shapes, View, hidden_of

if TYPE_CHECKING:
    from torch import Generator, Tensor


@register("linear")
class Linear(ModelPredictor):
    """A map H to E for every pair of layers, on what this layer's router reads."""

    learns = True

    def __init__(self, horizons: tuple[int, ...] = (1, 2)) -> None:
        """Learn for *horizons*, by default one and two layers ahead."""
        super().__init__(horizons)

    def shapes(self, geometry: Geometry, horizon: int) -> Shapes:
        """Return one matrix per pair."""
        pairs = max(geometry.n_moe_layers - horizon, 0)
        return {f"map.{horizon}": (pairs, geometry.n_experts, hidden_of(geometry))}

    def operations(self, geometry: Geometry, horizon: int) -> int:
        """Return the operations of the map."""
        return 2 * hidden_of(geometry) * geometry.n_experts

    def initial(self, geometry: Geometry, generator: Generator) -> dict[str, Tensor]:
        """Draw the maps, scaled by the square root of what they read."""
        import torch

        return {
            name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            for horizon in self.horizons
            for name, shape in self.shapes(geometry, horizon).items()
        }

    def logits(self, view: View, horizon: int) -> Tensor:
        """Return the map of the router input."""
        x = view.router_input.float()
        return x @ self.own(f"map.{horizon}", view.layer, x).T
