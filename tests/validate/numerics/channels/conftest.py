"""Small random experts, and the dense arithmetic that the reader is compared with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moetier.validate.numerics.channels.gating import Gating
from moetier.validate.numerics.experts import ExpertMatrices

Make = Callable[..., ExpertMatrices]
Draw = tuple[Tensor, Tensor, Tensor]


@pytest.fixture
def make() -> Make:
    """Return a function that makes random experts with a dimension E in front."""

    def made(
        experts: int = 6,
        channels: int = 24,
        hidden: int = 40,
        *,
        gating: Gating | None = None,
        biases: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> ExpertMatrices:
        rng = torch.Generator().manual_seed(experts * channels + hidden)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=rng) * scale).to(dtype)

        bias = (0.3, 0.3, 0.3) if biases else None
        return ExpertMatrices(
            normal(experts, channels, hidden, scale=hidden**-0.5),
            normal(experts, channels, hidden, scale=hidden**-0.5),
            normal(experts, hidden, channels, scale=channels**-0.5),
            normal(experts, channels, scale=0.3) if bias else None,
            normal(experts, channels, scale=0.3) if bias else None,
            normal(experts, hidden, scale=0.3) if bias else None,
            gating or Gating(),
        )

    return made


@pytest.fixture
def draw() -> Callable[..., Draw]:
    """Return a function that draws hidden states, expert ids and gate weights."""

    def drawn(tokens: int = 9, experts: int = 6, hidden: int = 40, top_k: int = 3) -> Draw:
        rng = torch.Generator().manual_seed(tokens)
        ids = torch.rand(tokens, experts, generator=rng).argsort(-1)[:, :top_k]
        weights = torch.rand(tokens, top_k, generator=rng)
        return torch.randn(tokens, hidden, generator=rng), ids, weights

    return drawn


@pytest.fixture
def dense() -> Callable[..., Tensor]:
    """Return the plain arithmetic of experts, one token and one expert after the other.

    Only channels in *mask*, (T, K, I), contribute, where one is given.
    """

    def computed(
        m: ExpertMatrices, x: Tensor, ids: Tensor, weights: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        assert m.gate is not None
        out = torch.zeros_like(x)
        for t, row in enumerate(ids.tolist()):
            for slot, e in enumerate(row):
                gate, up = m.gate[e] @ x[t], m.up[e] @ x[t]
                if m.gate_bias is not None and m.up_bias is not None:
                    gate, up = gate + m.gate_bias[e], up + m.up_bias[e]
                act = m.activation(gate, up)
                made = m.down[e] @ (act if mask is None else act * mask[t, slot])
                if m.down_bias is not None:
                    made = made + m.down_bias[e]
                out[t] += weights[t, slot] * made
        return out

    return computed
