"""Norms and routers are found in every family that has them, and others are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moetier.traces.capture.hook import ExpertsCall, attach
from moetier.traces.capture.probe import probe
from moetier.traces.errors import InputError
from moetier.traces.predictors.learn.parts import find_parts

Build = Callable[..., Any]
IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])
FAMILIES = (
    "DeepseekV2", "DeepseekV3", "Ernie4_5Moe", "Glm4Moe", "GptOss", "GraniteMoe", "Jamba",
    "Lfm2Moe", "MiniMaxM2", "Mixtral", "NemotronH", "Olmoe", "Phimoe", "Qwen2Moe", "Qwen3Moe",
    "Qwen3Next", "Qwen3VLMoe", "Qwen3_5Moe",
)  # fmt: skip
# what the router reads is what a module of this name, of the decoder layer, returns
NORMS = {
    "Qwen3Moe": "post_attention_layernorm",
    "Mixtral": "post_attention_layernorm",
    "GptOss": "post_attention_layernorm",
    "Jamba": "pre_ff_layernorm",
    "Lfm2Moe": "ffn_norm",
    "NemotronH": "norm",
}


def hooks(model: Any) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )


def calls_of(model: Any) -> list[ExpertsCall]:
    calls: list[ExpertsCall] = []
    with torch.no_grad(), attach(model, calls.append):
        model(input_ids=IDS, use_cache=False)
    return calls


def known(value: torch.Tensor | None) -> torch.Tensor:
    assert value is not None
    return value


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_compute_what_the_model_computed(family: str, build: Build) -> None:
    model = build(family)
    parts = find_parts(model)

    with parts.residuals() as residuals:
        calls = calls_of(model)
    assert parts.n_layers == len(calls)
    for call in calls:
        layer, read = call.moe_layer, known(call.router_input)
        torch.testing.assert_close(parts.norm(layer, residuals[layer]).detach(), read)
        scores = parts.scores(layer, parts.logits(layer, read)).detach()
        wanted = parts.gate.select(known(call.scores), layer)
        torch.testing.assert_close(scores, wanted.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["DeepseekV3", "Mixtral", "Qwen3Moe"])
def test_parts_of_a_model_in_16_bits(family: str, build: Build) -> None:
    model = build(family).to(torch.bfloat16)
    parts = find_parts(model)

    for call in calls_of(model):
        made = parts.scores(call.moe_layer, parts.logits(call.moe_layer, known(call.router_input)))
        wanted = parts.gate.select(known(call.scores), call.moe_layer)
        torch.testing.assert_close(made, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("family", sorted(NORMS))
def test_the_norm_is_the_one_before_the_router(family: str, build: Build) -> None:
    parts = find_parts(build(family))

    for found in parts.layers:
        assert found.norm is getattr(found.where.decoder, NORMS[family])


def test_a_family_whose_router_reads_the_residual_itself_is_refused(build: Build) -> None:
    with pytest.raises(InputError, match=r"inside Gemma4ForCausalLM.*residual is not found"):
        find_parts(build("Gemma4"))


def test_a_router_with_a_norm_of_its_own_is_refused(build: Build) -> None:
    model = build("Qwen3Moe")
    gate = model.model.layers[1].mlp.gate
    plain = gate.forward
    gate.forward = lambda hidden: plain(hidden / (1 + hidden.norm(dim=-1, keepdim=True)))

    with pytest.raises(InputError, match=r"Qwen3MoeForCausalLM.*no plain map.*norm of its own"):
        find_parts(model)


def test_a_router_without_rows_of_weights_is_refused(build: Build) -> None:
    model = build("Qwen3Moe")
    gate = model.model.layers[0].mlp.gate
    weight = gate.weight.data
    del gate.weight
    gate.weight = weight  # no parameter any more

    with pytest.raises(InputError, match="no weight of one row per expert"):
        find_parts(model)


def test_a_router_that_is_not_found_is_refused(build: Build) -> None:
    model = build("Mixtral")
    block = model.model.layers[1].mlp
    block.chooser = block.gate
    del block.gate
    block.__class__ = type("Block", (type(block),), {"gate": property(lambda self: self.chooser)})

    with pytest.raises(InputError, match=r"MixtralForCausalLM: its router's input or scores"):
        find_parts(model)


def test_finding_and_watching_leave_no_hook(build: Build) -> None:
    model = build("Qwen3Moe")
    parts = find_parts(model)
    assert hooks(model) == 0
    with parts.residuals():
        assert hooks(model) == parts.n_layers
    assert hooks(model) == 0
    with pytest.raises(KeyboardInterrupt), parts.residuals():
        raise KeyboardInterrupt
    assert hooks(model) == 0


def test_a_refusal_leaves_no_hook(build: Build) -> None:
    model = build("Gemma4")
    with pytest.raises(InputError):
        find_parts(model)

    assert hooks(model) == 0


def test_what_was_seen_is_not_looked_for_again(build: Build) -> None:
    model = build("Qwen3Moe")
    seen = probe(model)

    assert find_parts(model, seen).seen is seen


def test_parts_are_asked_past_other_hooks(build: Build) -> None:
    model = build("Qwen3Moe")
    parts = find_parts(model)
    heard: list[str] = []
    for found in parts.layers:
        found.norm.register_forward_hook(lambda *_: heard.append("norm"))
    parts.logits(1, parts.norm(1, torch.ones(2, 32)))

    assert heard == []
