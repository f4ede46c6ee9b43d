"""Check the training implementation of the experts against an expert-by-expert sum."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moetier.validate.fast_experts import EXACT, FAST, layout, register, sorted_experts

TOKENS, TOP_K, EXPERTS, HIDDEN, INNER = 11, 2, 5, 6, 4


class Experts(nn.Module):
    """What `sorted_experts` needs of a transformers module."""

    def __init__(self) -> None:
        """Draw the weights."""
        super().__init__()
        rng = torch.Generator().manual_seed(1)
        gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=rng, dtype=torch.float64)
        down = torch.randn(EXPERTS, HIDDEN, INNER, generator=rng, dtype=torch.float64)
        self.gate_up_proj = nn.Parameter(gate_up)
        self.down_proj = nn.Parameter(down)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, expert ids (expert 3 unused) and weights."""
    rng = torch.Generator().manual_seed(2)
    hidden = torch.randn(TOKENS, HIDDEN, generator=rng, dtype=torch.float64, requires_grad=True)
    scores = torch.rand(TOKENS, EXPERTS, generator=rng, dtype=torch.float64)
    scores[:, 3] = -1
    weights = torch.rand(TOKENS, TOP_K, generator=rng, dtype=torch.float64, requires_grad=True)
    return hidden, scores.topk(TOP_K, dim=-1).indices, weights


def reference(experts: Experts, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    rows = []
    for token in range(len(hidden)):
        row = torch.zeros(HIDDEN, dtype=hidden.dtype)
        for slot in range(index.shape[1]):
            expert = int(index[token, slot])
            gate, up = (experts.gate_up_proj[expert] @ hidden[token]).chunk(2)
            out = experts.down_proj[expert] @ (functional.silu(gate) * up)
            row = row + weights[token, slot] * out
        rows.append(row)
    return torch.stack(rows)


def test_the_sum_and_its_gradients_are_right() -> None:
    experts, (hidden, index, weights) = Experts(), inputs()
    leaves = [hidden, weights, *experts.parameters()]
    expected = reference(experts, hidden, index, weights)
    actual = sorted_experts(experts, hidden, index, weights, torch.float64)
    pull = torch.arange(actual.numel(), dtype=actual.dtype).view_as(actual)

    torch.testing.assert_close(actual, expected)
    for ours, theirs in zip(
        torch.autograd.grad(actual, leaves, pull),
        torch.autograd.grad(expected, leaves, pull),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_an_unused_expert_gets_no_gradient() -> None:
    experts, (hidden, index, weights) = Experts(), inputs()
    total = sorted_experts(experts, hidden, index, weights, torch.float64).sum()
    (grad,) = torch.autograd.grad(total, [experts.down_proj])

    assert not grad[3].any()
    assert grad[0].any()


def test_bfloat16_products_are_close() -> None:
    experts, (hidden, index, weights) = Experts(), inputs()
    exact = sorted_experts(experts, hidden, index, weights, torch.float64)
    rough = sorted_experts(experts, hidden, index, weights, torch.bfloat16)

    assert rough.dtype == torch.float64
    torch.testing.assert_close(rough, exact, rtol=0.05, atol=0.2)


@pytest.mark.parametrize("grain", [1, 4, 64])
def test_the_layout_gives_each_expert_a_padded_block(grain: int) -> None:
    _, index, _ = inputs()
    rows, bounds = layout(index, EXPERTS, grain)
    counts = [int((index == expert).sum()) for expert in range(EXPERTS)]
    blocks = list(itertools.pairwise(bounds))

    assert [end - start for start, end in blocks] == [-(-n // grain) * grain for n in counts]
    assert len(set(rows.tolist())) == TOKENS * TOP_K
    for row, expert in zip(rows.tolist(), index.reshape(-1).tolist(), strict=True):
        start, end = blocks[expert]
        assert start <= row < end


def test_both_implementations_are_registered() -> None:
    register()
    register()

    assert {EXACT, FAST} <= set(ALL_EXPERTS_FUNCTIONS)
