"""Check that uneven channels change the weights and no output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moetier.validate.numerics.groupwise import requantised
from moetier.validate.numerics.spread import spread_channels

IDS = torch.arange(24).view(2, 12)


def small_model() -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.2,
    )
    return Qwen3MoeForCausalLM(config)


def test_not_one_bit_of_the_output_changes() -> None:
    model = small_model()
    before = model(input_ids=IDS).logits
    spread_channels(model)

    assert torch.equal(model(input_ids=IDS).logits, before)


def test_not_one_bit_changes_in_bfloat16_storage() -> None:
    plain, spread = small_model().to(torch.bfloat16), small_model().to(torch.bfloat16)
    spread_channels(spread)
    expected = plain.float()(input_ids=IDS).logits

    assert torch.equal(spread.float()(input_ids=IDS).logits, expected)


def test_scales_are_powers_of_two_with_the_asked_spread() -> None:
    plain, spread = small_model(), small_model()
    spread_channels(spread, octaves=2.0)
    before, after = (m.model.layers[1].mlp.experts.down_proj for m in (plain, spread))
    exponents = torch.log2(before / after).detach()

    assert torch.equal(exponents, exponents.round())
    assert torch.equal(exponents, exponents[:, :1].expand_as(exponents))
    assert float(exponents[:, 0].std()) == pytest.approx(2.0, rel=0.2)


def test_hidden_channels_are_scaled_alike_in_all_layers() -> None:
    model = small_model()
    spread_channels(model)
    first, second = (layer.post_attention_layernorm.weight for layer in model.model.layers)

    assert torch.equal(first, second)
    assert len(first.unique()) > 2


def test_no_spread_leaves_the_weights_alone() -> None:
    plain, spread = small_model(), small_model()
    spread_channels(spread, octaves=0.0)
    others = spread.state_dict()

    assert all(torch.equal(value, others[name]) for name, value in plain.state_dict().items())


def test_the_seed_decides_the_scales() -> None:
    weights = []
    for seed in (1, 1, 2):
        model = small_model()
        spread_channels(model, seed)
        weights.append(model.model.layers[0].mlp.experts.down_proj)

    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_low_bits_cost_more_with_uneven_channels() -> None:
    """The error of one layer's output, from experts of 3 bits."""
    errors = []
    for octaves in (0.0, 1.0, 2.0):
        model = small_model()
        spread_channels(model, octaves=octaves)
        exact = model(input_ids=IDS).logits.detach()
        for layer in model.model.layers:
            for weights in layer.mlp.experts.parameters():
                weights.data = requantised(weights.data, 3)
        error = model(input_ids=IDS).logits.detach() - exact
        errors.append(float(error.square().mean()))

    assert errors == sorted(errors)
