"""The hook sees what the experts receive, changes nothing, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moetier.traces.errors import InputError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from moetier.traces.capture.hook import ExpertsCall, attach  # noqa: E402  # needs torch

Build = Callable[..., Any]
IDS = torch.tensor([[5, 17, 33, 8, 50, 21], [9, 3, 40, 41, 12, 30]])


def forward(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def generate(model: Any) -> Any:
    return model.generate(
        IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=5, do_sample=False
    )


def hooks(model: Any) -> int:
    kinds = [f"_forward_{kind}" for kind in ("pre_hooks", "hooks", "hooks_with_kwargs")]
    kinds += ["_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called"]
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def test_logits_and_tokens_are_bit_identical_while_attached_and_after(
    family: str, build: Build
) -> None:
    model = build(family)
    config, before = model.config.to_dict(), hooks(model)
    implementation = model.config.get_text_config()._experts_implementation
    logits, tokens = forward(model), generate(model)
    calls: list[ExpertsCall] = []
    with attach(model, calls.append):
        attached = forward(model), generate(model)

    assert calls
    assert torch.equal(attached[0], logits)
    assert torch.equal(attached[1], tokens)
    assert torch.equal(forward(model), logits)
    assert torch.equal(generate(model), tokens)
    assert model.config.to_dict() == config
    assert model.config.get_text_config()._experts_implementation == implementation
    assert hooks(model) == before


def test_every_layer_is_called_once_with_scores_ids_and_weights(family: str, build: Build) -> None:
    model = build(family)
    calls: list[ExpertsCall] = []
    with attach(model, calls.append) as layers:
        forward(model)

    assert [call.moe_layer for call in calls] == list(range(len(layers)))
    for call in calls:
        top_k = 3 if family == "Qwen2Moe" else 2
        assert call.ids.shape == call.weights.shape == (12, top_k)
        assert call.hidden.shape == (12, 24 if family == "NemotronH" else 32)
        assert call.scores is not None
        assert call.scores.shape == (12, 8)
        assert call.router_input is not None
        assert call.router_input.shape == (12, 32)


def test_what_cannot_be_seen_is_refused_by_name(unseen_family: str, build: Build) -> None:
    model = build(unseen_family)

    with pytest.raises(InputError, match=type(model).__name__), attach(model, print):
        pytest.fail("attached")
    assert hooks(model) == 0


@pytest.mark.parametrize(
    ("name", "reason"), [("Llama4", "already sorted"), ("JetMoe", "sorts the tokens itself")]
)
def test_the_refusal_gives_the_reason(name: str, reason: str, build: Build) -> None:
    with pytest.raises(InputError, match=reason), attach(build(name), print):
        pytest.fail("attached")


def test_overriding_changes_the_output_and_stopping_restores_it(family: str, build: Build) -> None:
    model = build(family)
    logits = forward(model)

    def next_expert(call: ExpertsCall) -> tuple[Any, Any]:
        return (call.ids + 1) % 8, call.weights

    with attach(model, next_expert):
        changed = forward(model)

    assert not torch.allclose(changed, logits, atol=1e-4)
    assert torch.equal(forward(model), logits)


def test_overriding_with_the_same_is_bit_identical(family: str, build: Build) -> None:
    model = build(family)
    logits = forward(model)
    with attach(model, lambda call: (call.ids.clone(), call.weights.double())):
        assert torch.equal(forward(model), logits)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_an_override_may_use_more_or_fewer_experts(implementation: str, build: Build) -> None:
    model = build("Qwen3Moe")
    model.set_experts_implementation(implementation)
    with attach(model, lambda call: (call.ids[:, :1], call.weights[:, :1])):
        first_only = forward(model)

    def zeroed(call: ExpertsCall) -> tuple[Any, Any]:
        return call.ids, call.weights * torch.tensor([1.0, 0.0])

    with attach(model, zeroed):
        by_weight = forward(model)

    torch.testing.assert_close(first_only, by_weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("override", "what"),
    [
        (lambda call: (call.ids[:3], call.weights), "ids of shape"),
        (lambda call: (call.ids, call.weights[0]), "weights of shape"),
        (lambda call: (call.ids, call.weights[:, :1]), "2 ids and 1 weights"),
    ],
)
def test_an_override_of_the_wrong_shape_is_refused(override: Any, what: str, build: Build) -> None:
    model = build("Mixtral")

    with pytest.raises(ValueError, match=what), attach(model, override):
        forward(model)
    assert hooks(model) == 0


def test_an_exception_inside_a_forward_leaves_no_hook(build: Build) -> None:
    model = build("Qwen2Moe")
    logits = forward(model)

    def fail(call: ExpertsCall) -> None:
        if call.moe_layer == 1:
            raise RuntimeError("observer")

    with pytest.raises(RuntimeError, match="observer"), attach(model, fail):
        forward(model)

    assert hooks(model) == 0
    assert torch.equal(forward(model), logits)


def test_after_a_failed_forward_the_next_one_is_still_seen(build: Build) -> None:
    model = build("Qwen3Moe")
    seen: list[tuple[int, int]] = []

    def observe(call: ExpertsCall) -> None:
        seen.append((call.forward, call.moe_layer))
        if len(seen) == 1:
            raise RuntimeError("once")

    with attach(model, observe):
        with pytest.raises(RuntimeError, match="once"):
            forward(model)
        forward(model)

    assert seen == [(0, 0), (1, 0), (1, 1)]


def test_dense_layers_in_between_keep_both_indices(build: Build) -> None:
    with attach(build("Qwen2Moe"), lambda call: None) as layers:
        found = [(where.layer, where.moe_layer, where.name) for where in layers]

    assert found == [(0, 0, "model.layers.0.mlp.experts"), (2, 1, "model.layers.2.mlp.experts")]


def test_two_observers_see_the_same_call(build: Build) -> None:
    model = build("Mixtral")
    first: list[ExpertsCall] = []
    second: list[ExpertsCall] = []
    with attach(model, first.append), attach(model, second.append):
        forward(model)

    assert [call.ids.tolist() for call in first] == [call.ids.tolist() for call in second]


def test_experts_called_by_keyword_are_seen(build: Build) -> None:
    model = build("GptOss")
    model.set_experts_implementation("eager")  # the one that takes the family's own names
    experts = model.model.layers[0].mlp.experts
    hidden, ids = torch.randn(2, 32), torch.tensor([[0, 1], [2, 3]])
    weights = torch.full((2, 2), 0.5)
    calls: list[ExpertsCall] = []
    with attach(model, calls.append), torch.no_grad():
        experts(hidden, routing_weights=weights, router_indices=ids)

    assert calls[0].ids is ids
    assert calls[0].weights is weights
    assert calls[0].forward == 0


def test_a_block_that_bypasses_its_experts_is_refused(build: Build) -> None:
    model = build("Qwen3Moe")
    block = model.model.layers[1].mlp
    block.forward = lambda hidden: hidden  # what a fused kernel does

    with pytest.raises(InputError, match=r"2 MoE layers 1, 0 times"), attach(model, print):
        forward(model)
    assert hooks(model) == 0


def test_two_stacks_are_refused(build: Build) -> None:
    pair = torch.nn.ModuleDict({"thinker": build("Mixtral"), "talker": build("Mixtral")})

    with pytest.raises(InputError, match="2 stacks"), attach(pair, print):
        pytest.fail("attached")


def test_expert_parallelism_is_refused(build: Build) -> None:
    model = build("Mixtral")
    model.model.layers[0].mlp.experts._is_expert_parallel = True

    with pytest.raises(InputError, match="expert parallelism"), attach(model, print):
        pytest.fail("attached")


def test_experts_outside_a_numbered_layer_are_refused(build: Build) -> None:
    alone = torch.nn.ModuleDict({"experts": build("Mixtral").model.layers[0].mlp.experts})

    with (
        pytest.raises(InputError, match="'experts' are in no numbered layer"),
        attach(alone, print),
    ):
        pytest.fail("attached")


def test_two_experts_in_one_layer_are_refused(build: Build) -> None:
    model = build("Mixtral")
    model.model.layers[0].second = build("Mixtral").model.layers[0].mlp

    with pytest.raises(InputError, match="two experts modules in one layer"), attach(model, print):
        pytest.fail("attached")
