"""This module computes experts the plain way, one after another, as an independent check.

Shapes: T tokens, K experts per token, H hidden (or the latent width), I expert intermediate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moetier.traces.errors import InputError


def expert_output(experts: nn.Module, expert: int, hidden: Tensor) -> Tensor:
    """Return what one *expert* makes of *hidden* (T, H), in the type of the weights: (T, H).

    Knows the layouts of the experts interface: gate and up fused in halves or interleaved, stored
    plain or transposed, with or without biases, clamped, and without a gate.
    """
    module: Any = experts
    if module.has_gate:
        gate, up = halves(module, _linear(module, "gate_up_proj", expert, hidden))  # (T, I) each
        act = activated(module, gate, up)
    else:
        act = activated(module, None, _linear(module, "up_proj", expert, hidden))
    out = _linear(module, "down_proj", expert, act)
    if module.has_post_expert_norm:
        out = module.post_expert_norm(out)
    return out


def rebuild(experts: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts, (T, H), in *hidden*'s type.

    *ids* and *weights* are (T, K). Experts are visited in ascending id, whatever the slot.
    Raises `InputError` for a layout that is not known.
    """
    total = torch.zeros_like(hidden, dtype=torch.float32)
    for expert in sorted(set(ids.flatten().tolist())):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        made = expert_output(experts, expert, hidden[token]).float()
        total.index_add_(0, token, made * weights[token, slot].float()[:, None])
    return total.to(hidden.dtype)


def halves(experts: nn.Module, both: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of gate's and of up's part of *both*, (..., 2I), which *experts* keep fused."""
    module: Any = experts
    if module.is_concatenated:
        gate, up = both.chunk(2, -1)
        return gate, up
    return both[..., ::2], both[..., 1::2]


def activated(experts: nn.Module, gate: Tensor | None, up: Tensor) -> Tensor:
    """Return what *experts* make of the products with gate and up, (..., I); None: no gate."""
    module: Any = experts
    limit, alpha = getattr(module, "limit", None), getattr(module, "alpha", None)
    if gate is not None and limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if gate is not None and alpha is not None:  # the swiglu of gpt-oss
        return (up + 1) * gate * torch.sigmoid(alpha * gate)
    act: Callable[[Tensor], Tensor] | None = getattr(module, "act_fn", None)
    if act is None:
        raise InputError(f"the activation of {type(module).__name__} is not known")
    return act(up) if gate is None else act(gate) * up


def _linear(module: Any, name: str, expert: int, x: Tensor) -> Tensor:
    weight = getattr(module, name)[expert]
    y = x.to(weight.dtype) @ (weight if module.is_transposed else weight.T)
    if module.has_bias:
        y = y + getattr(module, f"{name}_bias")[expert]
    result: Tensor = y
    return result
