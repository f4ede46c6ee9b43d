"""Training makes predictors better, on other prompts, and the same for the same seed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from moetier.traces.errors import InputError
from moetier.traces.predictors import create
from moetier.traces.predictors.base import ModelPredictor
from moetier.traces.predictors.hybrid import Hybrid
from moetier.traces.predictors.learn.evaluate import evaluate, recall, summary
from moetier.traces.predictors.learn.samples import Samples, Split, split
from moetier.traces.predictors.learn.train import Settings, train

QUICK = Settings(epochs=4, batch=32, learning_rate=3e-3)
LEARNING = [
    {"kind": "estimator", "width": 16},
    {"kind": "estimator", "width": 16, "correct": True},
    {"kind": "hybrid", "width": 16},
    {"kind": "low-rank", "rank": 4},
    {"kind": "linear"},
    {"kind": "mlp"},
]


@pytest.fixture
def parts(learnt_from: Any) -> Any:
    return learnt_from[1]


@pytest.fixture
def tokens(learnt_from: Any) -> Split:
    return split(learnt_from[2], held_out=0.25, validation=0.2, seed=0)


@pytest.mark.parametrize("spec", LEARNING, ids=str)
def test_training_improves_over_the_start(spec: Any, parts: Any, tokens: Split) -> None:
    trained = train(create(spec), tokens, parts, QUICK)

    assert min(trained.losses[1:]) < trained.losses[0]
    horizons = trained.predictor.horizons
    assert [(m.horizon, m.layer) for m in trained.held_out] == [
        (h, layer) for h in horizons for layer in range(h, 3)
    ]
    assert all(0 <= m.recall_at_k <= m.recall_at_2k <= 1 for m in trained.held_out)


@pytest.mark.parametrize("kind", ["router-reuse", "default-vector"])
def test_what_has_nothing_to_fit_is_measured(kind: str, parts: Any, tokens: Split) -> None:
    trained = train(create(kind), tokens, parts)

    assert trained.losses == []
    assert [m.layer for m in trained.held_out] == [1, 2]
    assert all((m.cosine_q is None) == (kind == "router-reuse") for m in trained.held_out)
    assert all(m.n_tokens == len(tokens.held_out) for m in trained.held_out)


def test_low_rank_starts_at_the_router_it_corrects(parts: Any, tokens: Split) -> None:
    predictor = create({"kind": "low-rank", "rank": 4})
    assert isinstance(predictor, ModelPredictor)
    predictor.tensors = predictor.initial(parts.geometry, torch.Generator().manual_seed(0))
    view = tokens.train.view(0, parts)

    wanted = parts.logits(2, tokens.train.layers[0].router_input)
    assert torch.equal(predictor.logits(view, 2), wanted)
    a = predictor.tensors["a.1"]
    assert a.std() * 4 == pytest.approx(1, rel=0.1)


def test_an_estimator_that_corrects_starts_at_the_default_vectors(
    parts: Any, tokens: Split
) -> None:
    plain = train(create("default-vector"), tokens, parts)
    start = train(
        create({"kind": "estimator", "correct": True}), tokens, parts, replace(QUICK, epochs=0)
    )

    assert [m.recall_at_k for m in start.held_out] == [m.recall_at_k for m in plain.held_out]
    assert [m.cosine_q for m in start.held_out] == [m.cosine_q for m in plain.held_out]


def test_the_same_seed_gives_the_same_weights(parts: Any, tokens: Split) -> None:
    def weights(seed: int) -> Any:
        torch.manual_seed(int(torch.randint(1000, (1,))))  # whatever the global state is
        spec = {"kind": "low-rank", "rank": 4}
        return train(create(spec), tokens, parts, replace(QUICK, seed=seed)).predictor.tensors

    one, again, other = weights(1), weights(1), weights(2)
    assert list(one) == list(again)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["a.1"], other["a.1"])


def test_training_leaves_the_global_random_state_and_the_model(
    learnt_from: Any, tokens: Split
) -> None:
    model, parts, _ = learnt_from
    before = [value.clone() for value in model.parameters()]
    state = torch.get_rng_state()
    train(create({"kind": "mlp"}), tokens, parts, replace(QUICK, epochs=1))

    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(value.grad is None for value in model.parameters())


def test_it_stops_when_the_validation_loss_does_not_fall(parts: Any, tokens: Split) -> None:
    settings = Settings(epochs=50, batch=8, learning_rate=3.0, patience=2)
    seen: list[tuple[int, int]] = []
    trained = train(
        create({"kind": "linear"}),
        tokens,
        parts,
        settings,
        lambda done, of: seen.append((done, of)),
    )
    best = trained.losses.index(min(trained.losses))

    assert len(trained.losses) == best + 3
    assert seen == [(epoch, 50) for epoch in range(1, len(trained.losses))]


def test_the_best_weights_are_kept(parts: Any, tokens: Split) -> None:
    settings = Settings(epochs=6, batch=8, learning_rate=3.0, patience=2)
    trained = train(create({"kind": "low-rank", "rank": 2}), tokens, parts, settings)
    once = train(
        create({"kind": "low-rank", "rank": 2}), tokens, parts, replace(settings, epochs=0)
    )

    if trained.losses.index(min(trained.losses)) == 0:
        for name, value in once.predictor.tensors.items():
            assert torch.equal(value, trained.predictor.tensors[name])
    else:
        assert min(trained.losses) < once.losses[0]


def test_the_hybrid_takes_the_better_of_both_where_it_measured(parts: Any, tokens: Split) -> None:
    hybrid = train(create({"kind": "hybrid", "width": 16}), tokens, parts, QUICK).predictor
    assert isinstance(hybrid, Hybrid)
    estimator = train(create({"kind": "estimator", "width": 16}), tokens, parts, QUICK).predictor
    default = train(create("default-vector"), tokens, parts).predictor
    recalls = [
        [m.recall_at_k for m in evaluate(each, tokens.validation, parts)]
        for each in (hybrid, estimator, default)
    ]

    assert recalls[0] == [max(pair) for pair in zip(recalls[1], recalls[2], strict=True)]
    assert hybrid.layers == [i for i, (a, b) in enumerate(zip(*recalls[1:], strict=True)) if a > b]
    assert hybrid.arguments == {"width": 16, "layers": hybrid.layers}


@pytest.mark.parametrize("layers", [[], [0], [1], [0, 1]])
def test_the_hybrid_uses_each_where_it_is_told_to(
    layers: list[int], parts: Any, tokens: Split
) -> None:
    spec = {"kind": "hybrid", "width": 16, "layers": layers}
    hybrid = train(create(spec), tokens, parts, QUICK).predictor
    assert isinstance(hybrid, Hybrid)

    assert hybrid.layers == layers
    for layer in (0, 1):
        view = tokens.held_out.view(layer, parts)
        plain = parts.logits(layer + 1, hybrid.state(view, 1))
        wanted = hybrid.trained(view, 1) if layer in layers else plain
        assert torch.equal(hybrid.logits(view, 1), wanted)


def test_weights_are_kept_in_the_type_of_the_model(learnt_from: Any, parts: Any) -> None:
    samples = learnt_from[2]
    low = Samples(
        [replace(layer, residual=layer.residual.bfloat16()) for layer in samples.layers],
        samples.prompt,
    )
    tokens = split(low, held_out=0.25, validation=0.2, seed=0)
    trained = train(create({"kind": "linear"}), tokens, parts, replace(QUICK, epochs=1))

    tensors = trained.predictor.tensors
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    held = sum(value.numel() * 2 for value in tensors.values())
    assert sum(e.nbytes or 0 for e in trained.predictor.entries(parts.geometry)) == held


@pytest.mark.parametrize("kind", ["previous-token", "popularity"])
def test_what_looks_at_batches_has_nothing_to_learn(kind: str, parts: Any, tokens: Split) -> None:
    with pytest.raises(InputError, match=f"'{kind}' has nothing to learn"):
        train(create(kind), tokens, parts)


def test_a_horizon_beyond_the_last_layer_is_refused(parts: Any, tokens: Split) -> None:
    with pytest.raises(InputError, match="has 3 MoE layers: none is 3 after another"):
        train(create({"kind": "linear", "horizons": [3]}), tokens, parts)


def test_recall_counts_the_experts_that_were_found() -> None:
    scores = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
    ids = torch.tensor([[0, 2], [2, 3]])

    assert recall(scores, ids, 2).tolist() == [0.5, 1.0]
    assert recall(scores, ids, 1).tolist() == [0.5, 0.5]
    assert recall(scores, ids, 9).tolist() == [1.0, 1.0]


def test_cosines_compare_with_what_the_router_read(learnt_from: Any, parts: Any) -> None:
    samples = learnt_from[2]
    found = evaluate(train_default(samples, parts), samples, parts)
    norm = learnt_from[0].model.layers[1].post_attention_layernorm
    a, b = norm(samples.layers[0].residual).detach(), samples.layers[1].router_input
    wanted = (torch.nn.functional.normalize(a) * torch.nn.functional.normalize(b)).sum(1).mean()

    assert found[0].cosine_r == pytest.approx(float(wanted), abs=1e-5)
    assert found[0].cosine_q is not None


def train_default(samples: Samples, parts: Any) -> ModelPredictor:
    tokens = split(samples, held_out=0.25, validation=0.2, seed=0)
    return train(create("default-vector"), tokens, parts).predictor


def test_the_summary_is_the_mean_over_layers(learnt_from: Any, parts: Any) -> None:
    predictor = create({"kind": "router-reuse", "horizons": [1, 2]})
    assert isinstance(predictor, ModelPredictor)
    found = evaluate(predictor, learnt_from[2], parts)
    means = summary(found)

    assert [row["horizon"] for row in means] == [1, 2]
    assert means[0]["recall_at_k"] == (found[0].recall_at_k + found[1].recall_at_k) / 2
    assert means[1]["exact_set"] == found[2].exact_set
    assert means[0]["cosine_q"] is None


@pytest.mark.slow
def test_on_moe_tiny_vectors_and_training_pay() -> None:
    from moetier.traces.capture.load import load_model
    from moetier.traces.predictors.learn.parts import find_parts
    from moetier.traces.predictors.learn.samples import from_prompts
    from moetier.traces.samples import moe_tiny_path
    from moetier.traces.samples.tasks import training_items

    model, tokenizer = load_model(str(moe_tiny_path()))
    parts = find_parts(model)
    prompts = [item.prompt for item in itertools.islice(training_items(0), 150)]
    samples = from_prompts(parts, tokenizer, prompts, max_new_tokens=8, batch_size=30, seed=0)
    tokens = split(samples, held_out=0.25, validation=0.1, seed=0)

    def mean_recall(spec: Any) -> float:
        trained = train(create(spec), tokens, parts, Settings(epochs=15, patience=3))
        return float(summary(trained.held_out)[0]["recall_at_k"])

    reuse, default = mean_recall("router-reuse"), mean_recall("default-vector")
    corrected = mean_recall({"kind": "estimator", "correct": True})
    low_rank = mean_recall({"kind": "low-rank", "rank": 16, "horizons": [1]})
    assert reuse > 0.5  # by chance it is 1/8
    assert default > reuse
    assert corrected > default + 0.02
    assert low_rank > reuse
