"""This module gives a small model's experts the uneven channels that large models have.

Large models have channels whose weights and activations are many times larger than the others',
which is what makes low-bit formats lossy (LLM.int8(), arXiv:2208.07339; SmoothQuant,
arXiv:2211.10438). A model trained for an hour has none, and loses next to nothing down to two
bits. Scaling one side of a product by a power of two and the other by its inverse brings them in,
and changes no output by a single bit: SmoothQuant's migration of scale, backwards.

Shapes: E experts, H hidden, I expert hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

OCTAVES = 1.25
"""Standard deviation of the channels' scales, in powers of two, before rounding to whole ones."""


def spread_channels(model: Any, seed: int = 0, octaves: float = OCTAVES) -> None:
    """Rescale channels of *model*, a Qwen3MoeForCausalLM, in place; its function stays the same.

    Hidden channels are scaled between the norm before the experts and what reads it (router, gate
    and up projections), alike in all layers, as outlier channels are. An expert's inner channels
    are scaled between its up and its down projection.
    """
    rng = torch.Generator().manual_seed(seed)
    hidden = _scales((model.config.hidden_size,), octaves, rng)  # (H)
    with torch.no_grad():
        for layer in model.model.layers:
            experts = layer.mlp.experts
            layer.post_attention_layernorm.weight /= hidden
            layer.mlp.gate.weight *= hidden
            experts.gate_up_proj *= hidden
            n_experts, _, n_inner = experts.down_proj.shape
            inner = _scales((n_experts, n_inner), octaves, rng)  # (E, I)
            experts.gate_up_proj[:, n_inner:] *= inner.unsqueeze(2)
            experts.down_proj /= inner.unsqueeze(1)


def _scales(shape: tuple[int, ...], octaves: float, rng: torch.Generator) -> Tensor:
    return torch.exp2(torch.round(octaves * torch.randn(shape, generator=rng)))
