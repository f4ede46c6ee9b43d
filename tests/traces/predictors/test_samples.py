"""What predictors learn from is what the model did, split by prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moetier.traces.capture import hidden as hidden_module
from moetier.traces.capture.hidden import HiddenWriter, hidden_folder, read_hidden
from moetier.traces.capture.run import capture
from moetier.traces.errors import InputError
from moetier.traces.io import TraceReader
from moetier.traces.predictors.learn.parts import find_parts
from moetier.traces.predictors.learn.samples import LayerSamples, Samples, from_trace, split
from moetier.traces.predictors.learn.vectors import default_vectors

Build = Callable[..., Any]


@pytest.fixture
def captured(tmp_path: Path, build: Build, tokenizer: Any, prompts: list[str]) -> tuple[Any, Path]:
    model = build("Qwen3Moe")
    out = tmp_path / "t.parquet"
    capture(model, tokenizer, prompts[:5], out, max_new_tokens=3, batch_size=2, hidden=True)
    return model, out


def made_up(prompts: list[int]) -> Samples:
    n = len(prompts)
    values = torch.arange(n, dtype=torch.float32)[:, None]
    layer = LayerSamples(values, values, torch.zeros(n, 1, dtype=torch.long), values)
    return Samples([layer], torch.tensor(prompts))


def test_residuals_are_stored_beside_router_inputs(captured: tuple[Any, Path]) -> None:
    model, out = captured
    for batch in read_hidden(out):
        assert batch.residual is not None
        norm = model.model.layers[batch.moe_layer].post_attention_layernorm
        torch.testing.assert_close(norm(batch.residual).detach(), batch.hidden)


def test_shards_keep_inputs_and_residuals_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_module, "SHARD_BYTES", 60)
    with HiddenWriter(tmp_path / "t.parquet") as writer:
        for step in range(12):
            row = torch.full((1, 4), float(step))
            writer.add(step, 0, row, row + 100 if step % 2 else None)
    found = list(read_hidden(tmp_path / "t.parquet"))

    assert [int(batch.hidden[0, 0]) for batch in found] == list(range(12))
    for batch in found:
        if batch.step % 2:
            assert batch.residual is not None
            assert torch.equal(batch.residual, batch.hidden + 100)
        else:
            assert batch.residual is None


def test_a_family_without_a_norm_keeps_its_router_inputs(
    tmp_path: Path, build: Build, tokenizer: Any, prompts: list[str]
) -> None:
    out = tmp_path / "t.parquet"
    capture(build("Gemma4"), tokenizer, prompts[:1], out, max_new_tokens=1, hidden=True)

    assert all(batch.residual is None for batch in read_hidden(out))


def test_samples_hold_the_same_tokens_at_every_layer(captured: tuple[Any, Path]) -> None:
    model, out = captured
    samples = from_trace(out, find_parts(model))
    reader = TraceReader(out)
    tokens = sum(batch.n_tokens for batch in reader.batches() if batch.layer == 0)

    assert len(samples) == tokens
    assert set(samples.prompt.tolist()) == set(range(5))
    for layer in samples.layers:
        assert layer.residual.shape == layer.router_input.shape == (tokens, 32)
        assert layer.ids.shape == layer.weights.shape == (tokens, 2)
    for number, layer in enumerate(samples.layers):
        logits = layer.router_input @ model.model.layers[number].mlp.gate.weight.T
        assert torch.equal(logits.topk(2).indices.sort().values, layer.ids.sort().values)


def test_a_capture_of_another_model_is_refused(captured: tuple[Any, Path], build: Build) -> None:
    with pytest.raises(InputError, match="captured from a model with fingerprint"):
        from_trace(captured[1], find_parts(build("Qwen3Moe", seed=1)))


def test_a_capture_without_hidden_states_is_refused(captured: tuple[Any, Path]) -> None:
    model, out = captured
    for file in hidden_folder(out).iterdir():
        file.unlink()

    with pytest.raises(InputError, match="capture with --hidden"):
        from_trace(out, find_parts(model))


def test_a_capture_without_residuals_is_refused(captured: tuple[Any, Path]) -> None:
    model, out = captured
    stored = list(read_hidden(out))
    with HiddenWriter(out) as writer:
        for batch in stored:
            writer.add(batch.step, batch.moe_layer, batch.hidden)

    with pytest.raises(InputError, match="no residuals beside the trace"):
        from_trace(out, find_parts(model))


def test_hidden_states_of_another_capture_are_refused(captured: tuple[Any, Path]) -> None:
    model, out = captured
    stored = list(read_hidden(out))
    with HiddenWriter(out) as writer:
        for batch in stored:
            writer.add(batch.step + 1, batch.moe_layer, batch.hidden, batch.residual)

    with pytest.raises(InputError, match="hidden states of another capture"):
        from_trace(out, find_parts(model))


def test_no_prompt_is_in_two_parts() -> None:
    prompts = [i // 3 for i in range(60)]
    parts = split(made_up(prompts), held_out=0.25, validation=0.1, seed=0)
    sets = [set(p.prompt.tolist()) for p in (parts.train, parts.validation, parts.held_out)]

    assert parts.prompts == (13, 2, 5)
    assert [len(item) for item in sets] == [13, 2, 5]
    assert set.union(*sets) == set(range(20))
    assert len(parts.train) + len(parts.validation) + len(parts.held_out) == 60
    rows = parts.held_out.layers[0].residual[:, 0].long()
    assert [prompts[row] for row in rows.tolist()] == parts.held_out.prompt.tolist()


def test_a_split_follows_from_its_seed() -> None:
    def held_out(seed: int) -> set[int]:
        found = split(made_up(list(range(40))), held_out=0.2, validation=0.1, seed=seed)
        return set(found.held_out.prompt.tolist())

    assert held_out(3) == held_out(3)
    assert held_out(3) != held_out(4)


@pytest.mark.parametrize(("n", "share"), [(2, 0.2), (5, 0.8), (1, 0.1)])
def test_too_few_prompts_are_refused(n: int, share: float) -> None:
    with pytest.raises(InputError, match=f"{n} prompts cannot be split.*give more prompts"):
        split(made_up(list(range(n))), held_out=share, validation=0.1, seed=0)


def test_three_prompts_are_enough() -> None:
    assert split(made_up([0, 1, 2]), held_out=0.2, validation=0.1, seed=0).prompts == (1, 1, 1)


def test_default_vectors_are_mean_outputs(learnt_from: Any) -> None:
    model, parts, samples = learnt_from
    vectors = default_vectors(samples, parts)
    assert vectors.shape == (2, 8, 32)

    for layer in range(2):
        experts, found = model.model.layers[layer].mlp.experts, samples.layers[layer]
        for expert in range(8):
            mine = found.router_input[(found.ids == expert).any(1)]
            if len(mine):
                gate, up = (mine @ experts.gate_up_proj[expert].T).chunk(2, -1)
                out = (torch.nn.functional.silu(gate) * up) @ experts.down_proj[expert].T
                torch.testing.assert_close(
                    vectors[layer, expert], out.mean(0).detach(), rtol=1e-3, atol=1e-5
                )


def test_an_expert_that_was_never_chosen_has_a_default_vector(learnt_from: Any) -> None:
    _, parts, samples = learnt_from
    layers = [
        LayerSamples(x.residual, x.router_input, torch.zeros_like(x.ids), x.weights)
        for x in samples.layers
    ]
    vectors = default_vectors(Samples(layers, samples.prompt), parts)

    assert torch.isfinite(vectors).all()
    assert (vectors.abs().sum(-1) > 0).all()


def test_experts_of_another_width_have_no_default_vectors(
    build: Build, tokenizer: Any, prompts: list[str], tmp_path: Path
) -> None:
    model = build("NemotronH")
    out = tmp_path / "t.parquet"
    capture(model, tokenizer, prompts[:2], out, max_new_tokens=1, hidden=True)
    parts = find_parts(model)

    with pytest.raises(InputError, match="experts of NemotronHForCausalLM do not read"):
        default_vectors(from_trace(out, parts), parts)
