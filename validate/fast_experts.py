"""This module computes a layer's experts fast on a CPU, with gradients, for training.

Assignments (one token and one of its experts each) are sorted by expert once; every expert is
then three plain matrix products on a contiguous block, forwards and backwards. Several times
faster on one core than the implementations that transformers ships, and equal to them up to
rounding.

Shapes: T tokens, K experts per token, A = T * K assignments, E experts, H hidden, I expert hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

NAME = "moetier_sorted"
"""The name under which `register` offers this implementation to transformers."""


class _SortedExperts(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]  # the base class takes anything
        ctx: Any, hidden: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor
    ) -> Tensor:
        n_tokens, top_k = index.shape
        order = torch.argsort(index.reshape(-1), stable=True)  # (A)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        ends = torch.bincount(index.reshape(-1), minlength=len(gate_up)).cumsum(0).tolist()

        x = hidden[order // top_k]  # (A, H)
        pre = x.new_empty(len(order), gate_up.shape[1])  # (A, 2I)
        for expert, (start, end) in _blocks(ends):
            torch.mm(x[start:end], gate_up[expert].t(), out=pre[start:end])
        gate, up = pre.chunk(2, dim=-1)
        act = functional.silu(gate) * up  # (A, I)
        y = torch.empty_like(x)  # (A, H)
        for expert, (start, end) in _blocks(ends):
            torch.mm(act[start:end], down[expert].t(), out=y[start:end])

        ctx.save_for_backward(x, pre, act, y, gate_up, down, order, place, weights)
        ctx.ends = ends
        per_token = y[place].view(n_tokens, top_k, -1)  # (T, K, H)
        return torch.bmm(weights.unsqueeze(1), per_token).squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, pre, act, y, gate_up, down, order, place, weights = ctx.saved_tensors
        n_tokens, top_k = weights.shape
        grad_y = grad[order // top_k]  # (A, H)
        grad_weights = (grad_y * y).sum(-1)[place].view(n_tokens, top_k)
        grad_y = grad_y * weights.reshape(-1)[order].unsqueeze(1)

        grad_act = torch.empty_like(act)
        grad_down = torch.zeros_like(down)
        for expert, (start, end) in _blocks(ctx.ends):
            torch.mm(grad_y[start:end], down[expert], out=grad_act[start:end])
            torch.mm(grad_y[start:end].t(), act[start:end], out=grad_down[expert])

        gate, up = pre.chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        grad_pre = torch.empty_like(pre)
        half = act.shape[1]
        grad_pre[:, :half] = grad_act * up * (sigmoid + silu * (1 - sigmoid))
        grad_pre[:, half:] = grad_act * silu

        grad_x = torch.empty_like(x)
        grad_gate_up = torch.zeros_like(gate_up)
        for expert, (start, end) in _blocks(ctx.ends):
            torch.mm(grad_pre[start:end], gate_up[expert], out=grad_x[start:end])
            torch.mm(grad_pre[start:end].t(), x[start:end], out=grad_gate_up[expert])
        grad_hidden = grad_x[place].view(n_tokens, top_k, -1).sum(1)
        return grad_hidden, grad_gate_up, grad_down, None, grad_weights


def _blocks(ends: list[int]) -> list[tuple[int, tuple[int, int]]]:
    """Pair each expert that has assignments with the block they occupy."""
    starts = [0, *ends[:-1]]
    blocks = enumerate(zip(starts, ends, strict=True))
    return [(expert, block) for expert, block in blocks if block[0] < block[1]]


def sorted_experts(
    experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return the weighted sum of each token's experts, (T, H); the signature is transformers'."""
    result: Tensor = _SortedExperts.apply(  # type: ignore[no-untyped-call]  # torch's own
        hidden_states, experts.gate_up_proj, experts.down_proj, top_k_index, top_k_weights
    )
    return result


def register() -> None:
    """Offer this implementation to transformers as `NAME`; doing so twice is harmless."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, sorted_experts)
