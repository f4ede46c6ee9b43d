"""A checkpoint says what it is for, and is refused elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moetier.traces.errors import InputError
from moetier.traces.predictors import create
from moetier.traces.predictors.hybrid import Hybrid
from moetier.traces.predictors.learn import checkpoint
from moetier.traces.predictors.learn.checkpoint import (
    find_predictor,
    load_predictor,
    read_about,
    save_predictor,
)
from moetier.traces.predictors.learn.samples import split
from moetier.traces.predictors.learn.train import Settings, train

Build = Callable[..., Any]


def saved(learnt_from: Any, path: Path, spec: Any) -> Any:
    """Train a little and save; return the predictor."""
    model, parts, samples = learnt_from
    tokens = split(samples, held_out=0.25, validation=0.2, seed=0)
    trained = train(create(spec), tokens, parts, Settings(epochs=1, batch=64))
    metrics = {"recall": trained.held_out[0].recall_at_k}
    save_predictor(
        trained.predictor, path, model=model, geometry=parts.geometry, seed=5, metrics=metrics
    )
    return trained.predictor


@pytest.mark.parametrize(
    "spec",
    [
        "router-reuse",
        "default-vector",
        {"kind": "low-rank", "rank": 3, "horizons": [1]},
        {"kind": "hybrid", "width": 8, "correct": True},
    ],
    ids=str,
)
def test_what_was_saved_predicts_the_same(learnt_from: Any, tmp_path: Path, spec: Any) -> None:
    model, parts, samples = learnt_from
    path = tmp_path / "p.safetensors"
    predictor = saved(learnt_from, path, spec)
    loaded: Any = load_predictor(path, model)

    assert (loaded.kind, loaded.horizons) == (predictor.kind, predictor.horizons)
    assert dict(loaded.arguments) == dict(predictor.arguments)
    for layer in (0, 1):
        view = samples.view(layer, parts)
        made, wanted = loaded.predict(view), predictor.predict(view)
        assert list(made) == list(wanted)
        assert all(torch.equal(made[horizon], wanted[horizon]) for horizon in made)
    if isinstance(loaded, Hybrid):
        assert loaded.layers == predictor.layers


def test_the_header_says_what_it_is(learnt_from: Any, tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    saved(learnt_from, path, {"kind": "low-rank", "rank": 3})
    about = read_about(path)
    with safe_open(path, framework="pt") as file:
        text = file.metadata()["moetier"]

    assert json.loads(text)["kind"] == "low-rank"
    assert about.arguments == {"rank": 3}
    assert about.seed == 5
    assert about.model == "qwen3_moe"
    assert about.geometry == learnt_from[1].geometry
    assert len(about.model_fingerprint) == 64
    assert set(about.versions) == {"moetier", "torch"}
    assert set(about.metrics) == {"recall"}
    assert [item.name for item in tmp_path.iterdir()] == ["p.safetensors"]


def test_another_model_is_refused_by_name(learnt_from: Any, tmp_path: Path, build: Build) -> None:
    path = tmp_path / "p.safetensors"
    saved(learnt_from, path, "default-vector")

    with pytest.raises(
        InputError,
        match=r"p\.safetensors: predictor 'default-vector' was trained on qwen3_moe "
        r"\([0-9a-f]{12}\), not on this Qwen3MoeForCausalLM \([0-9a-f]{12}\); train it",
    ):
        load_predictor(path, build("Qwen3Moe", num_hidden_layers=3, seed=1))


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_about(tmp_path / "none.safetensors")
    other = tmp_path / "other.safetensors"
    other.write_text("not a checkpoint")
    with pytest.raises(InputError, match="not a predictor"):
        read_about(other)
    save_file({"x": torch.zeros(1)}, other)
    with pytest.raises(InputError, match="no 'moetier' header"):
        read_about(other)
    save_file({"x": torch.zeros(1)}, other, metadata={"moetier": '{"kind": "linear"}'})
    with pytest.raises(InputError, match="header, key 'arguments'"):
        read_about(other)


def test_a_byte_that_changed_is_noticed_wherever_it_is(learnt_from: Any, tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    saved(learnt_from, path, {"kind": "low-rank", "rank": 3})
    whole = path.read_bytes()
    begin = whole.index(b"{")
    places = [*range(begin, len(whole), max(1, (len(whole) - begin) // 200)), len(whole) - 1]

    for at in places:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(InputError):
            load_predictor(path, learnt_from[0])
    path.write_bytes(whole)
    load_predictor(path, learnt_from[0])


def test_another_version_is_refused(
    learnt_from: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.safetensors"
    saved(learnt_from, path, "default-vector")
    monkeypatch.setattr(checkpoint, "VERSION", 3)

    with pytest.raises(InputError, match="predictor version 2, this moetier reads 3"):
        read_about(path)


def test_a_name_finds_a_checkpoint_or_a_kind(learnt_from: Any, tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    saved(learnt_from, path, {"kind": "linear", "horizons": [1]})

    assert find_predictor(str(path), learnt_from[0]).kind == "linear"
    assert find_predictor("popularity", learnt_from[0]).kind == "popularity"
    with pytest.raises(InputError, match="unknown predictor 'populrity'"):
        find_predictor("populrity", learnt_from[0])
    with pytest.raises(InputError, match="no such file"):
        find_predictor("none.safetensors", learnt_from[0])


def test_an_error_while_writing_leaves_nothing(learnt_from: Any, tmp_path: Path) -> None:
    path = tmp_path / "none" / "p.safetensors"
    with pytest.raises(InputError, match="does not exist"):
        saved(learnt_from, path, "default-vector")

    assert list(tmp_path.iterdir()) == []
