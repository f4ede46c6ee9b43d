"""This module learns a network per pair of layers, as ProMoE does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetier.traces.geometry import Geometry
from moetier.traces.predictors import register
from moetier.traces.predictors.base import ModelPredictor, Shapes, View, hidden_of

if TYPE_CHECKING:
    from torch import Generator, Tensor


@register("mlp")
class Mlp(ModelPredictor):
    """Two maps H to H to E without bias for every pair of layers, as ProMoE has them."""

    learns = True

    def __init__(self, horizons: tuple[int, ...] = (1, 2)) -> None:
        """Learn for *horizons*, by default one and two layers ahead."""
        super().__init__(horizons)

    def shapes(self, geometry: Geometry, horizon: int) -> Shapes:
        """Return both matrices of every pair."""
        pairs, hidden = max(geometry.n_moe_layers - horizon, 0), hidden_of(geometry)
        return {
            f"up.{horizon}": (pairs, hidden, hidden),
            f"down.{horizon}": (pairs, geometry.n_experts, hidden),
        }

    def operations(self, geometry: Geometry, horizon: int) -> int:
        """Return the operations of both maps and the activation between them."""
        hidden = hidden_of(geometry)
        return 2 * hidden * (hidden + geometry.n_experts) + hidden

    def initial(self, geometry: Geometry, generator: Generator) -> dict[str, Tensor]:
        """Draw the maps, scaled by the square root of what they read."""
        import torch

        return {
            name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            for horizon in self.horizons
            for name, shape in self.shapes(geometry, horizon).items()
        }

    def logits(self, view: View, horizon: int) -> Tensor:
        """Return the network's logits for the router input."""
        x = view.router_input.float()
        up, down = (self.own(f"{name}.{horizon}", view.layer, x) for name in ("up", "down"))
        return (x @ up.T).relu() @ down.T
