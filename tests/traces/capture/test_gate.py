"""Ways to weigh experts are told apart from what a router did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moetier.traces.errors import InputError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from moetier.traces.capture.find import MoeLayer, find_moe_layers  # noqa: E402  # needs torch
from moetier.traces.capture.gate import Gate, Sample, identify  # noqa: E402
from moetier.traces.capture.hook import ExpertsCall, attach  # noqa: E402
from moetier.traces.capture.probe import probe  # noqa: E402

Build = Callable[..., Any]
LOGITS = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def layers(build: Build) -> list[MoeLayer]:
    return find_moe_layers(build("Mixtral"))[:1]


def sample(scores: Any, weights: Any, k: int = 2) -> Sample:
    ids = weights.topk(k).indices
    return Sample(0, scores, ids, weights.gather(1, ids))


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("base", ["softmax", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_known_way_is_found(
    base: str, scale: float, normalised: bool, dtype: Any, layers: list[MoeLayer]
) -> None:
    values = getattr(LOGITS, base)(*([-1] if base == "softmax" else []))
    ids = values.topk(2).indices
    weights = values.gather(1, ids)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    found = identify(layers, [Sample(0, LOGITS, ids, (weights * scale).to(dtype))])

    assert (found.base, found.normalised) == (base, normalised)
    assert found.scale == pytest.approx(scale, rel=1e-2)
    assert found.score_kind == ("logits" if base == "softmax" else "sigmoid")
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        found.weigh(LOGITS, ids, 0), weights * scale, rtol=tolerance, atol=tolerance
    )


def test_probabilities_are_told_from_logits(layers: list[MoeLayer]) -> None:
    found = identify(layers, [sample(LOGITS.softmax(-1), LOGITS.softmax(-1))])

    assert (found.score_kind, found.base) == ("probabilities", "given")


def test_weights_made_in_another_way_leave_the_scores_and_are_not_remade(
    layers: list[MoeLayer],
) -> None:
    ids = LOGITS.topk(2).indices
    found = identify(layers, [Sample(0, LOGITS, ids, torch.rand(12, 2))])

    assert found.score_kind == "logits"
    assert torch.equal(found.select(LOGITS, 0), LOGITS)
    with pytest.raises(InputError, match="not known"):
        found.weigh(LOGITS, ids, 0)


def test_scores_that_do_not_explain_the_choice_are_of_an_unknown_kind(
    layers: list[MoeLayer],
) -> None:
    ids = (-LOGITS).topk(2).indices

    assert identify(layers, [Sample(0, LOGITS, ids, torch.rand(12, 2))]).score_kind == "unknown"


def test_a_bias_takes_part_in_the_choice_only() -> None:
    bias = torch.tensor([0.0] * 7 + [9.0])
    gate = Gate("sigmoid", "sigmoid", True, 1.0, (bias,), (None,))
    chosen = gate.select(LOGITS, 0).topk(2).indices

    assert (chosen[:, 0] == 7).all()
    torch.testing.assert_close(gate.weigh(LOGITS, chosen, 0).sum(-1), torch.ones(12))
    torch.testing.assert_close(gate.select(LOGITS, 0), LOGITS.sigmoid() + bias)


def test_other_experts_are_weighed_as_the_router_would(family: str, build: Build) -> None:
    model = build(family)
    gate = probe(model).gate
    assert gate is not None
    assert (gate.base == "none") is (family == "Phimoe")  # a thresholded softmax
    calls: list[ExpertsCall] = []
    with torch.no_grad(), attach(model, calls.append):
        model(input_ids=torch.tensor([[5, 17, 33, 8]]))

    for call in calls if gate.base != "none" else ():
        assert call.scores is not None
        both = gate.weigh(call.scores, call.ids, call.moe_layer)
        swapped = gate.weigh(call.scores, call.ids.flip(-1), call.moe_layer)
        torch.testing.assert_close(both, call.weights.float(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(swapped.flip(-1), both)


def test_layers_that_differ_are_refused(build: Build) -> None:
    model = build("Jamba")
    model.model.layers[3].feed_forward.router.top_k = 3

    with pytest.raises(InputError, match=r"differ: \[8\] experts, top \[2, 3\]"):
        probe(model)
