"""What holds for every predictor that is registered, in families that score differently."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moetier.traces.batch import DECODE, LayerBatch
from moetier.traces.errors import InputError
from moetier.traces.predictors import PREDICTORS, create
from moetier.traces.predictors.base import BatchPredictor, ModelPredictor, View
from moetier.traces.predictors.learn.checkpoint import load_predictor, save_predictor
from moetier.traces.predictors.learn.parts import find_parts
from moetier.traces.predictors.learn.running import attached, check_tensors
from moetier.traces.predictors.learn.samples import from_prompts, split
from moetier.traces.predictors.learn.train import Settings, train

SMALL: dict[str, dict[str, Any]] = {
    "estimator": {"width": 8},
    "hybrid": {"width": 8},
    "low-rank": {"rank": 2},
    "recall-model": {"recall": [0.9]},
}
# scores as logits, as sigmoids plus a bias, as probabilities plus a bias, and a biased router
FAMILIES = ("Qwen3Moe", "DeepseekV3", "Ernie4_5Moe", "GptOss")
LOOKING = ("popularity", "previous-token", "recall-model")
INSIDE = [name for name in PREDICTORS.names() if name not in LOOKING]


def spec_of(name: str) -> dict[str, Any]:
    return {"kind": name, **SMALL.get(name, {})}


@pytest.fixture(scope="module", params=FAMILIES)
def inside(request: pytest.FixtureRequest, tiny_models: Any) -> Any:
    """Return a model of the family with its parts and samples."""
    layers = {"num_hidden_layers": 4} if request.param != "GptOss" else {}
    model = tiny_models.build_model(request.param, **layers)
    parts = find_parts(model)
    words = ["ab cd ef", "gh ij kl mn", "op qr", "st uv wx yz ab", "cd gh st", "ij op yz cd"]
    samples = from_prompts(
        parts, tiny_models.WordTokenizer(), words, max_new_tokens=3, batch_size=6, seed=0
    )
    return model, parts, samples


@pytest.fixture(params=INSIDE)
def trained(request: pytest.FixtureRequest, inside: Any) -> ModelPredictor:
    _, parts, samples = inside
    spec = spec_of(request.param)
    if parts.n_layers < 3 and request.param in ("low-rank", "linear", "mlp"):
        spec["horizons"] = [1]
    tokens = split(samples, held_out=0.2, validation=0.2, seed=0)
    return train(create(spec), tokens, parts, Settings(epochs=1, batch=16)).predictor


def test_every_kind_is_in_one_of_the_lists() -> None:
    for name in PREDICTORS.names():
        predictor = create(spec_of(name))

        assert isinstance(predictor, BatchPredictor if name in LOOKING else ModelPredictor)
        assert (predictor.needs == "model") == (name in INSIDE)
        assert PREDICTORS.summary(name).endswith(".")


def test_scores_have_the_shape_and_kind_of_the_trace(trained: ModelPredictor, inside: Any) -> None:
    _, parts, samples = inside
    for layer in range(parts.n_layers):
        made = trained.predict(samples.view(layer, parts))

        assert list(made) == [h for h in trained.horizons if layer + h < parts.n_layers]
        for horizon, scores in made.items():
            assert scores.shape == (len(samples), 8)
            assert torch.isfinite(scores).all()
            target = layer + horizon
            bias = parts.gate.biases[target] if parts.gate.biases else None
            values = scores if bias is None else scores - bias
            if parts.score_kind == "sigmoid":
                assert ((values >= -1e-5) & (values <= 1 + 1e-5)).all()
            if parts.score_kind == "probabilities":
                torch.testing.assert_close(values.sum(1), torch.ones(len(samples)))


def test_a_token_is_predicted_the_same_alone_and_among_eight(
    trained: ModelPredictor, inside: Any
) -> None:
    _, parts, samples = inside
    together = trained.predict(samples.view(0, parts, slice(0, 8)))

    for row in range(8):
        alone = trained.predict(samples.view(0, parts, slice(row, row + 1)))
        for horizon, scores in alone.items():
            torch.testing.assert_close(
                scores[0].detach(), together[horizon][row].detach(), rtol=1e-4, atol=1e-5
            )


def test_predicting_twice_gives_the_same_and_changes_nothing(
    trained: ModelPredictor, inside: Any
) -> None:
    _, parts, samples = inside
    view = samples.view(0, parts)
    kept = {
        item.name: getattr(view, item.name).clone()
        for item in fields(View)
        if item.name not in ("layer", "parts")
    }
    first, second = trained.predict(view), trained.predict(view)

    assert all(torch.equal(first[horizon], second[horizon]) for horizon in first)
    assert all(torch.equal(getattr(view, name), value) for name, value in kept.items())


def test_its_weights_are_those_it_is_charged_for(trained: ModelPredictor, inside: Any) -> None:
    _, parts, _ = inside
    check_tensors(trained, parts)
    held = sum(value.numel() for value in trained.tensors.values())

    assert held == trained.n_parameters(parts.geometry)
    charged = sum(entry.nbytes or 0 for entry in trained.entries(parts.geometry))
    assert charged == sum(v.numel() * v.element_size() for v in trained.tensors.values())


def test_a_checkpoint_predicts_the_same(
    trained: ModelPredictor, inside: Any, tmp_path: Path
) -> None:
    model, parts, samples = inside
    path = tmp_path / "p.safetensors"
    save_predictor(trained, path, model=model, geometry=parts.geometry, seed=0, metrics={})
    loaded = load_predictor(path, model)
    assert isinstance(loaded, ModelPredictor)
    made, wanted = (each.predict(samples.view(0, parts)) for each in (loaded, trained))

    assert all(torch.equal(made[horizon], wanted[horizon]) for horizon in wanted)


def test_it_runs_inside_the_model_and_leaves_it(trained: ModelPredictor, inside: Any) -> None:
    model, parts, _ = inside
    with attached(trained, model, parts), torch.no_grad():
        model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)

    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", [name for name in INSIDE if name != "router-reuse"])
def test_without_its_weights_it_is_refused(name: str, inside: Any) -> None:
    model, parts, _ = inside

    with (
        pytest.raises(InputError, match=f"'{name}' is not trained.*train-predictor"),
        attached(create(spec_of(name)), model, parts),
    ):
        pytest.fail("attached")


def batches(n_tokens: int) -> Iterator[LayerBatch]:
    random = np.random.default_rng(0)
    for step in range(3):
        for layer in range(3):
            ids = random.random((n_tokens, 8)).argsort(axis=1)[:, :2]
            scores = random.random((n_tokens, 8), np.float32)
            requests = list(range(n_tokens))
            yield LayerBatch(
                step, DECODE, layer, n_tokens, n_tokens, ids.ravel().tolist(),
                requests=requests, scores=scores,
            )  # fmt: skip


@pytest.mark.parametrize("n_tokens", [1, 8])
@pytest.mark.parametrize("name", LOOKING)
def test_a_start_forgets_everything(name: str, n_tokens: int, inside: Any) -> None:
    geometry = inside[1].geometry.model_copy(update={"moe_layers": [0, 1, 2], "n_layers": 3})
    predictor = create(spec_of(name))
    assert isinstance(predictor, BatchPredictor)

    def run() -> list[dict[int, Any]]:
        predictor.start(geometry, "logits")
        found = []
        for batch in batches(n_tokens):
            made = predictor.predict(batch, {1: batch} if predictor.needs == "future" else {})
            predictor.observe(batch)
            assert all(scores.shape == (n_tokens, 8) for scores in made.values())
            found.append(made)
        return found

    once, again = run(), run()
    assert any(once)
    for one, other in zip(once, again, strict=True):
        assert list(one) == list(other)
        assert all(np.array_equal(one[horizon], other[horizon]) for horizon in one)
