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
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_with_kwargs")
    kinds = (*kinds, "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
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
