"""This module computes a layer's experts fast on a CPU, with gradients, for training.

Assignments (one token and one of its experts each) are sorted by expert; every expert is then two
plain matrix products on a contiguous block of rows, and four backwards. Products may run in
bfloat16 (weights, gradients and optimiser stay float32), which is four times faster on a core that
has AVX512-BF16 - but only for shapes seen before, since the kernel is compiled per shape. Blocks
are therefore padded with zero rows to a multiple of `GRAIN`.

Shapes: T tokens, K experts per token, A = T * K assignments, P >= A padded rows, E experts,
H hidden, I expert hidden.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

EXACT = "moetier_sorted"
FAST = "moetier_sorted_bf16"
"""The names under which `register` offers this module to transformers: float32 and bfloat16."""

GRAIN = 64


def layout(index: Tensor, n_experts: int, grain: int = GRAIN) -> tuple[Tensor, list[int]]:
    """Give every assignment of *index*, (T, K), a row so that each expert's rows are contiguous.

    Returns the rows, (A,), and the *n_experts* + 1 bounds of the experts' blocks.
    """
    flat = index.reshape(-1)
    counts = torch.bincount(flat, minlength=n_experts)
    padded = (counts + grain - 1) // grain * grain
    shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)  # (E)
    order = torch.argsort(flat, stable=True)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(len(order), device=order.device) + shift[flat[order]]
    return rows, [0, *padded.cumsum(0).tolist()]


class _SortedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        gate_up: Tensor,
        down: Tensor,
        index: Tensor,
        weights: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        n_tokens, top_k = index.shape
        gate_up, down = gate_up.to(dtype), down.to(dtype)
        rows, bounds = layout(index, len(gate_up))
        blocks = [(e, s, t) for e, (s, t) in enumerate(pairwise(bounds)) if s < t]

        x = _spread(hidden.to(dtype).repeat_interleave(top_k, 0), rows, bounds[-1])  # (P, H)
        pre = x.new_empty(len(x), gate_up.shape[1])  # (P, 2I)
        for e, s, t in blocks:
            torch.mm(x[s:t], gate_up[e].t(), out=pre[s:t])
        gate, up = pre.chunk(2, dim=-1)
        act = functional.silu(gate) * up  # (P, I)
        y = torch.empty_like(x)  # (P, H)
        for e, s, t in blocks:
            torch.mm(act[s:t], down[e].t(), out=y[s:t])
        per_token = y[rows].view(n_tokens, top_k, -1).to(weights.dtype)  # (T, K, H)

        ctx.save_for_backward(x, pre, act, per_token, gate_up, down, rows, weights)
        ctx.blocks = blocks
        return torch.bmm(weights.unsqueeze(1), per_token).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs  # (T, H)
        x, pre, act, per_token, gate_up, down, rows, weights = ctx.saved_tensors
        n_tokens, top_k = weights.shape
        grad_weights = torch.bmm(per_token, grad.unsqueeze(2)).squeeze(2)
        weighted = (weights.unsqueeze(2) * grad.unsqueeze(1)).to(x.dtype)  # (T, K, H)
        grad_y = _spread(weighted.view(-1, x.shape[1]), rows, len(x))  # (P, H)

        grad_act = torch.empty_like(act)
        grad_down = torch.zeros_like(down)
        for e, s, t in ctx.blocks:
            torch.mm(grad_y[s:t], down[e], out=grad_act[s:t])
            torch.mm(grad_y[s:t].t(), act[s:t], out=grad_down[e])

        gate, up = pre.chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        grad_pre = torch.cat(
            [grad_act * up * (sigmoid + silu * (1 - sigmoid)), grad_act * silu], dim=-1
        )

        grad_x = torch.empty_like(x)
        grad_gate_up = torch.zeros_like(gate_up)
        for e, s, t in ctx.blocks:
            torch.mm(grad_pre[s:t], gate_up[e], out=grad_x[s:t])
            torch.mm(grad_pre[s:t].t(), x[s:t], out=grad_gate_up[e])
        grad_hidden = grad_x[rows].view(n_tokens, top_k, -1).sum(1)
        full = grad.dtype
        return (
            grad_hidden.to(full),
            grad_gate_up.to(full),
            grad_down.to(full),
            None,
            grad_weights,
            None,
        )


def _spread(values: Tensor, rows: Tensor, n_rows: int) -> Tensor:
    """Place *values*, (A, ...), in *rows* of an otherwise zero tensor of *n_rows* rows."""
    return values.new_zeros(n_rows, values.shape[1]).index_copy_(0, rows, values)


def sorted_experts(
    experts: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the weighted sum of each token's experts, (T, H), with the products in *dtype*."""
    result: Tensor = _SortedExperts.apply(  # type: ignore[no-untyped-call]  # torch's own
        hidden_states, experts.gate_up_proj, experts.down_proj, top_k_index, top_k_weights, dtype
    )
    return result


def register() -> None:
    """Offer `EXACT` and `FAST` to transformers; doing so twice is harmless."""
    ALL_EXPERTS_FUNCTIONS.register(EXACT, sorted_experts)
    ALL_EXPERTS_FUNCTIONS.register(FAST, partial(sorted_experts, dtype=torch.bfloat16))
