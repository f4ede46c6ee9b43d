"""This module learns what the default vectors miss, with one network for all layers.

Speculating Experts (arXiv 2603.19289): a shallow network with a layer embedding reads q_l and gives
the logits of router l+1; the loss is KL to that router. Its published size for Qwen3-30B-A3B, about
17 M, is that of H -> 2H -> H -> E, which is the default here; other shapes have that size too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.traces.predictors import register
from moetier.traces.predictors.base import Shapes, View, hidden_of, router_operations
from moetier.traces.predictors.default_vector import QuasiHidden

if TYPE_CHECKING:
    from torch import Generator, Tensor

EMBEDDING, UP, DOWN, OUT = "layer_embedding", "up", "down", "out"


@register("estimator")
class Estimator(QuasiHidden):
    """A shallow network with a layer embedding, shared by all layers, on the quasi-hidden state."""

    learns = True

    def __init__(self, width: int | None = None, correct: bool = False) -> None:
        """Learn a network of *width*, by default twice the hidden size.

        With *correct* it adds to the next router's logits for q, rather than replacing them.
        """
        super().__init__((1,))
        if width is not None and width < 1:
            raise InputError(f"width {width} of predictor 'estimator'", way_out="at least 1")
        self.width, self.correct = width, correct

    def network(self, geometry: Geometry) -> Shapes:
        """Return the shapes of the network, without the default vectors it stands on."""
        hidden = hidden_of(geometry)
        width = self.width or 2 * hidden
        return {
            EMBEDDING: (geometry.n_moe_layers - 1, hidden),
            UP: (width, hidden),
            DOWN: (hidden, width),
            OUT: (geometry.n_experts, hidden),
        }

    def shapes(self, geometry: Geometry, horizon: int) -> Shapes:
        """Return the default vectors and the network."""
        return super().shapes(geometry, horizon) | self.network(geometry)

    def operations(self, geometry: Geometry, horizon: int) -> int:
        """Return the operations of q, the network and, where it corrects one, a router."""
        hidden = hidden_of(geometry)
        width = self.width or 2 * hidden
        network = 2 * hidden * (2 * width + geometry.n_experts) + 2 * hidden + width
        router = router_operations(geometry) if self.correct else 0
        return self.base_operations(geometry) + network + router

    def initial(self, geometry: Geometry, generator: Generator) -> dict[str, Tensor]:
        """Draw the network; one that corrects starts by changing nothing."""
        import torch

        made = {
            name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            for name, shape in self.network(geometry).items()
        }
        made[EMBEDDING] *= made[EMBEDDING].shape[-1] ** 0.5
        if self.correct:
            made[OUT] *= 0
        return made

    def trained(self, view: View, horizon: int) -> Tensor:
        """Return the network's logits for q."""
        q = self.state(view, horizon)
        x = q.float() + self.own(EMBEDDING, view.layer, q)
        up, down, out = (self.tensors[name].to(x.device).float() for name in (UP, DOWN, OUT))
        x = x @ up.T
        x = (x * x.sigmoid()) @ down.T
        made = (x * x.sigmoid()) @ out.T
        if self.correct:
            router = view.parts.logits(view.layer + horizon, q)
            return router + made.to(router.device)
        return made

    def logits(self, view: View, horizon: int) -> Tensor:
        """Return the network's logits for q."""
        return self.trained(view, horizon)
