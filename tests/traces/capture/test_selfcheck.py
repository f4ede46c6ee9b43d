"""What is captured is enough to compute again what the experts computed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from moetier.traces.errors import InputError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from moetier.traces.capture.hook import ExpertsCall, attach  # noqa: E402  # needs torch
from moetier.traces.capture.probe import probe  # noqa: E402
from moetier.traces.capture.rebuild import expert_output, rebuild  # noqa: E402
from moetier.traces.capture.selfcheck import self_check  # noqa: E402

Build = Callable[..., Any]
IDS = torch.tensor([[5, 17, 33, 8, 50, 21], [9, 3, 40, 41, 12, 30]])
GROUPED = ("DeepseekV2", "DeepseekV3")
KINDS = {
    "DeepseekV3": "sigmoid",
    "Ernie4_5Moe": "probabilities",
    "Gemma4": "probabilities",
    "Glm4Moe": "sigmoid",
    "Lfm2Moe": "sigmoid",
    "MiniMaxM2": "sigmoid",
    "NemotronH": "sigmoid",
}


def test_output_and_logits_are_rebuilt_in_every_family(family: str, build: Build) -> None:
    checks = self_check(build(family), {"input_ids": IDS})

    assert checks
    for check in checks:
        assert check.output_error < 1e-5
        assert check.ids_are_largest is (None if family in GROUPED else True)
        if family == "Gemma4":  # its router has a norm and a projection of its own
            assert check.logits_error is None
        else:
            assert check.logits_error is not None
            assert check.logits_error < 1e-5
        if family == "Phimoe":  # its weights come from a thresholded softmax
            assert check.weights_error is None
        else:
            assert check.weights_error is not None
            assert check.weights_error < 1e-5


def test_the_kind_of_scores_is_found_in_every_family(family: str, build: Build) -> None:
    found = probe(build(family))

    assert found.score_kind == KINDS.get(family, "logits")
    assert found.n_experts == 8
    assert found.gate is not None


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_every_implementation_is_rebuilt(implementation: str, build: Build) -> None:
    model = build("GptOss")
    model.set_experts_implementation(implementation)

    for check in self_check(model, {"input_ids": IDS}):
        assert check.output_error < 1e-5


def test_bfloat16_is_rebuilt_within_its_precision(build: Build) -> None:
    model = build("Qwen3Moe").to(torch.bfloat16)

    for check in self_check(model, {"input_ids": IDS}):
        assert check.output_error < 2e-2
        assert check.weights_error is not None
        assert check.weights_error < 2e-2


def test_the_check_bites_when_an_expert_is_not_what_ran(build: Build) -> None:
    model = build("Mixtral")
    calls: list[ExpertsCall] = []
    outputs = []
    with torch.no_grad(), attach(model, calls.append) as layers:
        handle = layers[0].experts.register_forward_hook(lambda m, a, o: outputs.append(o))
        model(input_ids=IDS)
        handle.remove()
        call = calls[0]
        right = rebuild(call.where.experts, call.hidden, call.ids, call.weights)
        wrong = rebuild(call.where.experts, call.hidden, (call.ids + 1) % 8, call.weights)

    torch.testing.assert_close(right, outputs[0], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(wrong, outputs[0], rtol=1e-2, atol=1e-3)


def test_a_rebuilt_output_is_the_weighted_sum_of_its_experts(build: Build) -> None:
    model = build("GptOss")
    experts = model.model.layers[0].mlp.experts
    hidden = torch.randn(3, 32)
    ids = torch.tensor([[0, 1], [1, 0], [2, 1]])
    weights = torch.tensor([[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]])
    with torch.no_grad():
        made = rebuild(experts, hidden, ids, weights)
        each = [expert_output(experts, e, hidden) for e in range(3)]

    expected = torch.stack(
        [
            0.25 * each[0][0] + 0.75 * each[1][0],
            each[1][1],
            0.5 * each[2][2] + 0.5 * each[1][2],
        ]
    )
    torch.testing.assert_close(made, expected)


def test_without_a_known_activation_it_is_refused() -> None:
    experts = SimpleNamespace(
        has_gate=True,
        is_concatenated=True,
        is_transposed=False,
        has_bias=False,
        gate_up_proj=torch.zeros(2, 8, 4),
        down_proj=torch.zeros(2, 4, 4),
    )

    with pytest.raises(InputError, match="activation of SimpleNamespace"):
        expert_output(experts, 0, torch.zeros(1, 4))  # type: ignore[arg-type]  # a stand-in


def test_a_norm_after_each_expert_is_applied() -> None:
    experts = SimpleNamespace(
        has_gate=False,
        is_transposed=False,
        has_bias=False,
        has_post_expert_norm=True,
        up_proj=torch.eye(4)[None].expand(2, 4, 4),
        down_proj=torch.eye(4)[None].expand(2, 4, 4),
        act_fn=torch.relu,
        post_expert_norm=lambda x: x * 10,
    )
    made = expert_output(experts, 0, torch.tensor([[1.0, -1.0, 2.0, 0.0]]))  # type: ignore[arg-type]  # a stand-in

    assert made.tolist() == [[10.0, 0.0, 20.0, 0.0]]
