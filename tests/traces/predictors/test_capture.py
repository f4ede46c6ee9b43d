"""A captured trace carries what a predictor said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moetier.traces import io as io_module
from moetier.traces.capture.hidden import read_hidden
from moetier.traces.capture.run import capture
from moetier.traces.errors import InputError
from moetier.traces.io import ArrayTrace, TraceReader, write_trace
from moetier.traces.predictors import create
from moetier.traces.predictors.annotate import Annotated, annotate
from moetier.traces.predictors.base import ModelPredictor, View
from moetier.traces.predictors.learn.parts import find_parts
from moetier.traces.testing import small_header, small_rows

Build = Callable[..., Any]


@pytest.mark.parametrize("batch_size", [1, 8])
def test_predictions_are_those_of_the_stored_residuals(
    tmp_path: Path, build: Build, tokenizer: Any, prompts: list[str], batch_size: int
) -> None:
    model = build("Qwen3Moe", num_hidden_layers=3)
    predictor = create({"kind": "router-reuse", "horizons": [1, 2]})
    assert isinstance(predictor, ModelPredictor)
    out = capture(
        model, tokenizer, prompts[:8], tmp_path / "t.parquet",
        max_new_tokens=4, batch_size=batch_size, hidden=True, predictor=predictor,
    )  # fmt: skip
    reader = TraceReader(out, with_scores=True)
    reader.validate()
    parts = find_parts(model)

    for batch, hidden in zip(reader.batches(), read_hidden(out), strict=True):
        assert hidden.residual is not None
        none = torch.zeros(batch.n_tokens, 1)
        view = View(batch.layer, hidden.residual, hidden.hidden, none.long(), none, parts)
        wanted = predictor.predict(view)
        assert sorted(batch.predicted) == sorted(wanted) == [1, 2][: 2 - batch.layer]
        for horizon, scores in batch.predicted.items():
            np.testing.assert_allclose(
                scores, wanted[horizon].detach().numpy(), rtol=1e-4, atol=1e-5
            )


def test_the_header_names_the_predictor_and_its_costs(
    tmp_path: Path, build: Build, tokenizer: Any, prompts: list[str]
) -> None:
    out = capture(
        build("Qwen3Moe"), tokenizer, prompts[:1], tmp_path / "t.parquet",
        max_new_tokens=1, predictor=create("router-reuse"),
    )  # fmt: skip
    (entry,) = TraceReader(out).header.predictors

    assert (entry.name, entry.horizon, entry.nbytes) == ("router-reuse", 1, 0)
    assert entry.operations == 4 * 32 + 2 * 32 * 8


def test_predicting_changes_nothing_else(
    tmp_path: Path, build: Build, tokenizer: Any, prompts: list[str]
) -> None:
    model = build("Mixtral")
    arguments = (model, tokenizer, prompts[:3])
    capture(*arguments, tmp_path / "a.parquet", max_new_tokens=4)
    capture(*arguments, tmp_path / "b.parquet", max_new_tokens=4, predictor=create("router-reuse"))
    plain, beside = (TraceReader(tmp_path / f"{x}.parquet", with_scores=True) for x in "ab")

    for one, other in zip(plain.batches(), beside.batches(), strict=True):
        assert one.experts == other.experts
        assert one.scores is not None
        assert other.scores is not None
        np.testing.assert_array_equal(one.scores, other.scores)


@pytest.mark.parametrize("kind", ["previous-token", "popularity"])
def test_predictors_that_look_back_say_the_same_while_capturing_and_later(
    tmp_path: Path, build: Build, tokenizer: Any, prompts: list[str], kind: str
) -> None:
    arguments = (build("Gemma4"), tokenizer, prompts[:4])
    options: Any = {"max_new_tokens": 3, "batch_size": 4}
    during = capture(*arguments, tmp_path / "a.parquet", predictor=create(kind), **options)
    plain = capture(*arguments, tmp_path / "b.parquet", **options)
    after = Annotated(TraceReader(plain, with_scores=True), create(kind))
    captured = TraceReader(during, with_scores=True)

    assert captured.header.predictors == after.header.predictors
    for one, other in zip(captured.batches(), after.batches(), strict=True):
        assert list(one.predicted) == list(other.predicted)
        for horizon, scores in one.predicted.items():
            np.testing.assert_allclose(scores, other.predicted[horizon], rtol=1e-6)


def test_a_predictor_of_another_family_leaves_no_trace(
    tmp_path: Path, build: Build, tokenizer: Any, prompts: list[str]
) -> None:
    with pytest.raises(InputError, match="no predictor works inside Gemma4"):
        capture(
            build("Gemma4"), tokenizer, prompts[:1], tmp_path / "t.parquet",
            max_new_tokens=1, predictor=create("router-reuse"),
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("spec", ["router-reuse", "popularity", "recall-model", "default-vector"])
def test_a_capture_is_annotated_later(
    tmp_path: Path, build: Build, tokenizer: Any, prompts: list[str], spec: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(io_module, "CHUNK_ROWS", 7)  # so that batches go on in the next chunk
    model = build("Qwen3Moe")
    wanted = {"kind": spec, "recall": [0.5]} if spec == "recall-model" else {"kind": spec}
    plain, out = tmp_path / "plain.parquet", tmp_path / "out.parquet"
    options: Any = {"max_new_tokens": 3, "batch_size": 4}
    capture(model, tokenizer, prompts[:4], plain, hidden=True, **options)
    predictor = create(wanted)
    if spec == "default-vector":
        predictor.tensors = {"default_vectors": torch.ones(1, 8, 32)}
    annotate(plain, out, predictor, model if predictor.needs == "model" else None)
    reader = TraceReader(out, with_scores=True)
    reader.validate()

    assert reader.header.predictors == predictor.entries(reader.header.geometry)
    source = TraceReader(plain, with_scores=True)
    if predictor.needs == "model":
        during = tmp_path / "during.parquet"
        capture(model, tokenizer, prompts[:4], during, predictor=predictor, **options)
        expected = list(TraceReader(during, with_scores=True).batches())
    else:
        expected = list(Annotated(source, create(wanted)).batches())
    found = list(reader.batches())
    assert any(batch.predicted for batch in found)
    for one, other in zip(found, expected, strict=True):
        assert (one.step, one.layer, one.experts) == (other.step, other.layer, other.experts)
        assert list(one.predicted) == list(other.predicted)
        for horizon, scores in one.predicted.items():
            np.testing.assert_allclose(scores, other.predicted[horizon], rtol=1e-4, atol=1e-6)


def test_annotating_again_replaces_what_was_predicted(tmp_path: Path) -> None:
    header = small_header()
    path = write_trace(ArrayTrace(header, [small_rows(header)]), tmp_path / "t.parquet")
    out = annotate(path, tmp_path / "out.parquet", create("popularity"))
    reader = TraceReader(out, with_scores=True)

    assert [(p.name, p.horizon) for p in reader.header.predictors] == [("popularity", 1)]
    before = TraceReader(path, with_scores=True)
    for one, other in zip(reader.batches(), before.batches(), strict=True):
        assert one.recorded == other.recorded
        assert set(one.predicted) <= {1}


def test_annotating_without_the_model_is_refused(tmp_path: Path) -> None:
    header = small_header()
    path = write_trace(ArrayTrace(header, [small_rows(header)]), tmp_path / "t.parquet")

    with pytest.raises(InputError, match=r"'linear' works inside a model, and none is given"):
        annotate(path, tmp_path / "out.parquet", create("linear"))
    assert [item.name for item in tmp_path.iterdir()] == ["t.parquet"]


def test_annotating_with_another_model_is_refused(
    tmp_path: Path, build: Build, tokenizer: Any, prompts: list[str]
) -> None:
    path = tmp_path / "t.parquet"
    capture(build("Qwen3Moe"), tokenizer, prompts[:1], path, max_new_tokens=1, hidden=True)

    with pytest.raises(InputError, match="captured from a model with fingerprint"):
        annotate(path, tmp_path / "o.parquet", create("router-reuse"), build("Qwen3Moe", seed=1))
    assert not (tmp_path / "o.parquet").exists()
