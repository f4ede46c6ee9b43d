"""This module corrects the later layer's own router by a low-rank map.

SpecPrefetch (arXiv 2607.24787): z = (W_gate^{(l+h)} + B A) x_l with W_gate frozen, A of r x H drawn
from a normal distribution over r, and B of E x r zero, so that training starts at the router. The
loss is 2 KL (h = 1) + KL (h = 2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.traces.predictors import register
from moetier.traces.predictors.base import (
    ModelPredictor,
    Shapes,
    View,
    hidden_of,
    router_operations,
)

if TYPE_CHECKING:
    from torch import Generator, Tensor


@register("low-rank")
class LowRank(ModelPredictor):
    """SpecPrefetch: the target's frozen router plus B A, on what this layer's router reads."""

    learns = True
    loss_weights = {1: 2.0}  # noqa: RUF012  # a constant, typed as a mapping

    def __init__(self, rank: int = 64, horizons: tuple[int, ...] = (1, 2)) -> None:
        """Learn maps of *rank* for *horizons*, by default one and two layers ahead."""
        super().__init__(horizons)
        if rank < 1:
            raise InputError(f"rank {rank} of predictor 'low-rank'", way_out="give at least 1")
        self.rank = rank

    def shapes(self, geometry: Geometry, horizon: int) -> Shapes:
        """Return A and B of every pair of layers; the router is the model's and not counted."""
        pairs = max(geometry.n_moe_layers - horizon, 0)
        return {
            f"a.{horizon}": (pairs, self.rank, hidden_of(geometry)),
            f"b.{horizon}": (pairs, geometry.n_experts, self.rank),
        }

    def operations(self, geometry: Geometry, horizon: int) -> int:
        """Return the operations of the router and of both maps."""
        maps = 2 * self.rank * (hidden_of(geometry) + geometry.n_experts)
        return router_operations(geometry) + maps

    def initial(self, geometry: Geometry, generator: Generator) -> dict[str, Tensor]:
        """Draw A from a normal distribution over the rank; let B be zero."""
        import torch

        made: dict[str, Tensor] = {}
        for horizon in self.horizons:
            shapes = self.shapes(geometry, horizon)
            a = torch.randn(shapes[f"a.{horizon}"], generator=generator) / self.rank
            made |= {f"a.{horizon}": a, f"b.{horizon}": torch.zeros(shapes[f"b.{horizon}"])}
        return made

    def logits(self, view: View, horizon: int) -> Tensor:
        """Return z."""
        x = view.router_input.float()
        a, b = (self.own(f"{name}.{horizon}", view.layer, x) for name in "ab")
        router = view.parts.logits(view.layer + horizon, view.router_input)
        return router + ((x @ a.T) @ b.T).to(router.device)
