"""Predictors inside a running model say what their formulas say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from moetier.traces.batch import LayerBatch
from moetier.traces.capture.hook import ExpertsCall, attach
from moetier.traces.capture.probe import probe
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.traces.live import Choice, LiveModel
from moetier.traces.predictors import create
from moetier.traces.predictors.base import ModelPredictor, View
from moetier.traces.predictors.default_vector import VECTORS
from moetier.traces.predictors.learn.evaluate import evaluate
from moetier.traces.predictors.learn.parts import find_parts
from moetier.traces.predictors.learn.running import attached, executed

Build = Callable[..., Any]


def padded(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask of *batch* prompts of different lengths, padded on the left."""
    widths = [3 + i % 4 for i in range(batch)]
    wide = max(widths)
    ids = [
        [0] * (wide - n) + [3 + (7 * i + j) % 50 for j in range(n)] for i, n in enumerate(widths)
    ]
    mask = [[0] * (wide - n) + [1] * n for n in widths]
    return torch.tensor(ids), torch.tensor(mask)


def run_live(
    model: Any, predictor: Any, batch: int = 1, decide: Any = None, parts: Any = None
) -> list[tuple[LayerBatch, dict[int, Any]]]:
    """Generate three tokens; return the batches with what was predicted from each."""
    ids, mask = padded(batch)
    heard: list[tuple[LayerBatch, dict[int, Any]]] = []

    def listen(layer: LayerBatch) -> Choice | None:
        choice: Choice | None = None if decide is None else decide(layer)
        if choice is not None:
            layer.experts, layer.weights = list(choice.experts), choice.weights
            layer.tokens = list(choice.tokens)
        assert layer.predict is not None
        heard.append((layer, layer.predict(layer)))
        return choice

    with (
        torch.no_grad(),
        attached(predictor, model, parts) as running,
        LiveModel(model, probe(model), running).driven(listen) as drive,
    ):
        drive.requests(mask)
        model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=3, do_sample=False, eos_token_id=None
        )
    return heard


def watch(model: Any, ids: torch.Tensor) -> tuple[list[Any], list[ExpertsCall], list[Any]]:
    """Return each layer's residual, experts call and experts' output of one forward pass."""
    residuals: list[Any] = []
    outputs: list[Any] = []
    calls: list[ExpertsCall] = []
    handles = []
    for layer in model.model.layers:
        norm, experts = layer.post_attention_layernorm, layer.mlp.experts
        handles.append(norm.register_forward_pre_hook(lambda _, args: residuals.append(args[0][0])))
        handles.append(experts.register_forward_hook(lambda _, args, out: outputs.append(out)))
    with torch.no_grad(), attach(model, calls.append):
        model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return residuals, calls, outputs


def by_hand(model: Any, layer: int, stream: torch.Tensor) -> torch.Tensor:
    """Return the logits of router *layer* for *stream*, written out."""
    decoder = model.model.layers[layer]
    norm = decoder.post_attention_layernorm
    scale = torch.rsqrt(stream.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    made: torch.Tensor = (stream * scale * norm.weight) @ decoder.mlp.gate.weight.T
    return made.detach()


def one_batch(call: ExpertsCall, experts: Any = None, weights: Any = None) -> LayerBatch:
    n = len(call.ids)
    experts = call.ids.flatten().tolist() if experts is None else experts
    weights = call.weights.flatten().numpy() if weights is None else weights
    return LayerBatch(0, 0, call.moe_layer, n, 1, experts, weights)


@pytest.mark.parametrize("horizon", [1, 2])
def test_router_reuse_is_the_later_router_on_the_residual(build: Build, horizon: int) -> None:
    model = build("Qwen3Moe", num_hidden_layers=3)
    ids = torch.arange(3, 9)[None]
    residuals, _, _ = watch(model, ids)
    predictor = create({"kind": "router-reuse", "horizons": [1, 2]})
    found: list[dict[int, Any]] = []
    with attached(predictor, model) as running:

        def ask(call: ExpertsCall) -> None:
            found.append(running.predict(call, torch.arange(6), one_batch(call)))

        with torch.no_grad(), attach(model, ask):
            model(input_ids=ids, use_cache=False)

    assert [sorted(made) for made in found] == [[1, 2], [1], []]
    wanted = by_hand(model, horizon, residuals[0])
    np.testing.assert_allclose(found[0][horizon], wanted, rtol=1e-4, atol=1e-5)


def test_default_vectors_of_exact_outputs_give_the_stream_after_the_experts(build: Build) -> None:
    model = build("Qwen3Moe")
    residuals, calls, outputs = watch(model, torch.tensor([[7]]))
    predictor = create("default-vector")
    assert isinstance(predictor, ModelPredictor)
    vectors = torch.zeros(1, 8, 32)
    from moetier.traces.capture.rebuild import expert_output

    for expert in range(8):
        vectors[0, expert] = expert_output(calls[0].where.experts, expert, calls[0].hidden)[0]
    predictor.tensors = {VECTORS: vectors.detach()}
    parts = find_parts(model)
    read = calls[0].router_input
    assert read is not None
    view = View(0, residuals[0], read, calls[0].ids, calls[0].weights, parts)
    made = predictor.predict(view)[1].detach()

    wanted = by_hand(model, 1, residuals[0] + outputs[0].reshape(1, 32))
    torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-5)
    d = sum(w * vectors[0, int(e)] for e, w in zip(view.ids[0], view.weights[0], strict=True))
    torch.testing.assert_close(made, by_hand(model, 1, residuals[0] + d), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "Glm4Moe", "Ernie4_5Moe", "GptOss"])
def test_a_predictor_that_knows_what_the_router_reads_has_recall_one(
    build: Build, tokenizer: Any, prompts: list[str], family: str
) -> None:
    from moetier.traces.predictors.learn.samples import from_prompts

    model = build(family)
    parts = find_parts(model)
    samples = from_prompts(parts, tokenizer, prompts[:6], max_new_tokens=3, batch_size=3, seed=0)

    class Knowing(ModelPredictor):
        def operations(self, geometry: Geometry, horizon: int) -> int:
            return 0

        def logits(self, view: View, horizon: int) -> torch.Tensor:
            target = view.layer + horizon
            return parts.logits(target, samples.layers[target].router_input)

    found = evaluate(Knowing([1]), samples, parts)
    assert len(found) == parts.n_layers - 1
    for item in found:
        assert (item.recall_at_k, item.recall_at_2k, item.exact_set) == (1.0, 1.0, 1.0)
        assert item.n_tokens == len(samples)


@pytest.mark.parametrize("batch", [1, 8])
def test_a_live_model_is_predicted_token_by_token(build: Build, batch: int) -> None:
    heard = run_live(build("Qwen3Moe"), create("router-reuse"), batch)
    tokens = int(padded(batch)[1].sum())

    assert [layer.n_tokens for layer, _ in heard] == [tokens] * 2 + [batch] * 4
    for layer, predicted in heard:
        assert sorted(predicted) == ([1] if layer.layer == 0 else [])
        for scores in predicted.values():
            assert scores.shape == (layer.n_tokens, 8)
            assert scores.dtype == np.float32
            assert np.isfinite(scores).all()


def test_a_request_is_predicted_the_same_alone_and_in_a_batch(build: Build) -> None:
    alone = run_live(build("Qwen3Moe"), create("router-reuse"), 1)
    together = run_live(build("Qwen3Moe"), create("router-reuse"), 8)

    for (_, mine), (layer, all_of_them) in zip(alone, together, strict=True):
        for horizon, scores in mine.items():
            assert layer.requests is not None
            rows = [i for i, request in enumerate(layer.requests) if request == 0]
            np.testing.assert_allclose(all_of_them[horizon][rows], scores, rtol=1e-3, atol=1e-4)


def test_what_is_executed_decides_the_quasi_hidden_state(build: Build) -> None:
    model = build("Qwen3Moe")
    predictor = create("default-vector")
    predictor.tensors = {VECTORS: torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0))}

    def others(layer: LayerBatch) -> Choice:
        token = list(range(layer.n_tokens))
        return Choice(token, [7] * len(token), np.ones(len(token), np.float32))

    plain, changed = run_live(model, predictor), run_live(model, predictor, decide=others)
    residual = watch(model, padded(1)[0])[0][0]
    wanted = by_hand(model, 1, residual + predictor.tensors[VECTORS][0, 7])

    assert np.abs(plain[0][1][1] - changed[0][1][1]).max() > 1e-3
    np.testing.assert_allclose(changed[0][1][1], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["previous-token", "popularity"])
def test_predictors_that_look_back_work_live(build: Build, kind: str) -> None:
    heard = run_live(build("Qwen3Moe"), create(kind), 2)
    scores = {(layer.step, layer.layer): layer.scores for layer, _ in heard}

    assert [sorted(made) for _, made in heard] == [[], [], [1], [], [1], []]
    if kind == "previous-token":
        np.testing.assert_array_equal(heard[4][1][1], scores[1, 1])


def test_the_future_is_refused_live(build: Build) -> None:
    predictor = create({"kind": "recall-model", "recall": [0.9]})

    with pytest.raises(InputError, match="knows the future"), attached(predictor, build("Mixtral")):
        pytest.fail("attached")


def test_a_family_without_parts_still_has_those_that_look_back(build: Build) -> None:
    model = build("Gemma4")
    with attached(create("popularity"), model):
        pass

    with pytest.raises(InputError, match="inside Gemma4"), attached(create("router-reuse"), model):
        pytest.fail("attached")


def test_an_untrained_predictor_is_refused(build: Build) -> None:
    predictor = create("default-vector")
    with pytest.raises(InputError, match="not trained"), attached(predictor, build("Mixtral")):
        pytest.fail("attached")

    predictor.tensors = {VECTORS: torch.zeros(3, 8, 32)}
    with (
        pytest.raises(InputError, match=r"\(3, 8, 32\), MixtralForCausalLM needs \(1, 8, 32\)"),
        attached(predictor, build("Mixtral")),
    ):
        pytest.fail("attached")


def test_attaching_leaves_no_trace_and_changes_nothing(build: Build) -> None:
    model = build("Qwen3Moe")
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        with attached(create("router-reuse"), model):
            during = model(input_ids=ids).logits
        after = model(input_ids=ids).logits

    assert torch.equal(before, during)
    assert torch.equal(before, after)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert sum(hooks) == 0


def test_a_residual_that_was_not_seen_is_an_error(build: Build) -> None:
    model = build("Qwen3Moe")
    _, calls, _ = watch(model, torch.tensor([[7, 8]]))

    with (
        pytest.raises(InputError, match="residual of MoE layer 0 was not seen"),
        attached(create("router-reuse"), model) as running,
    ):
        running.predict(calls[0], torch.arange(2), one_batch(calls[0]))


def test_executed_experts_of_uneven_tokens() -> None:
    weights = np.array([0.5, 0.1, 0.2, 0.3], np.float32)
    batch = LayerBatch(0, 1, 0, 3, 3, [4, 1, 2, 3], weights, tokens=[1, 2, 2, 1])
    ids, made = executed(batch)

    assert ids.tolist() == [[0, 0], [4, 3], [1, 2]]
    np.testing.assert_array_equal(made, np.array([[0, 0], [0.5, 0.3], [0.1, 0.2]], np.float32))
    even = LayerBatch(0, 1, 0, 2, 2, [4, 1, 2, 3], weights)
    assert executed(even)[0].tolist() == [[4, 1], [2, 3]]
    with pytest.raises(InputError, match="without gate weights"):
        executed(LayerBatch(0, 1, 0, 1, 1, [0]))
