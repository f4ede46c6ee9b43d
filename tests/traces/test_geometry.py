"""Tests of model geometries, published ones above all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry, load_geometry, published

SMALL: dict[str, Any] = {"name": "small", "n_experts": 4, "top_k": 2, "moe_layers": [1, 2]}


@pytest.mark.parametrize("name", published())
def test_every_published_geometry_loads_under_its_own_name(name: str) -> None:
    geometry = load_geometry(name)

    assert geometry.name == name
    assert geometry.source != "unverified"
    assert set(geometry.unverified) <= set(Geometry.model_fields)
    assert geometry.expert_weights > 0


@pytest.mark.parametrize(
    ("name", "megabytes"),
    [
        ("qwen3-30b-a3b", 9.44),
        ("qwen3-vl-30b-a3b", 9.44),
        ("qwen3-235b-a22b", 37.75),
        ("qwen3.5-35b-a3b", 6.29),
        ("qwen3.5-122b-a10b", 18.87),
        ("gemma-4-26b-a4b", 11.89),
        ("gpt-oss-20b", 49.77),
        ("gpt-oss-120b", 49.77),
        ("glm-4.7-flash", 18.87),
        ("mixtral-8x7b", 352.3),
        ("deepseek-v2-lite", 17.30),
        ("deepseek-vl2-tiny", 6.88),
        ("deepseek-vl2-small", 17.30),
        ("deepseek-vl2", 23.6),
        ("qwen1.5-moe-a2.7b", 17.30),
        ("olmoe-1b-7b", 12.58),
        ("phi-3.5-moe", 157.3),
        ("granite-3-1b-a400m", 3.15),
        ("granite-3-3b-a800m", 4.72),
    ],
)
def test_expert_sizes_are_the_published_ones(name: str, megabytes: float) -> None:
    size = load_geometry(name).expert_weights * 2 / 1e6

    assert size == pytest.approx(megabytes, rel=2e-3)


def test_the_number_of_all_published_sizes_that_are_tested_is_complete() -> None:
    assert len(published()) == 21  # 19 above, moe-tiny and moe-small


def test_moe_layers_may_be_written_as_a_range() -> None:
    geometry = load_geometry("deepseek-v2-lite")

    assert geometry.moe_layers == list(range(1, 27))
    assert (geometry.n_moe_layers, geometry.n_layers) == (26, 27)


def test_moe_tiny_is_what_its_configuration_says() -> None:
    import json

    from moetier.traces.samples import moe_tiny_path

    path = moe_tiny_path() / "config.json"
    if not path.is_file():
        pytest.skip("the checkpoint of moe-tiny is not there")
    config, geometry = json.loads(path.read_text()), load_geometry("moe-tiny")

    assert geometry.n_experts == config["num_local_experts"]
    assert geometry.top_k == config["num_experts_per_tok"]
    assert geometry.n_layers == geometry.n_moe_layers == config["num_hidden_layers"]
    assert geometry.hidden == config["hidden_size"]
    assert geometry.moe_intermediate == config["moe_intermediate_size"]
    assert (geometry.heads, geometry.kv_heads, geometry.head_dim) == (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
    )
    assert geometry.vocab == config["vocab_size"]
    assert geometry.tied_embeddings == config["tie_word_embeddings"]


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"unknown model 'gpt-5'; known: .*olmoe-1b-7b"):
        load_geometry("gpt-5")


def test_a_wrong_yaml_names_file_and_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.yaml").write_text("name: bad\nn_experts: 0\ntop_k: 1\nmoe_layers: [0]\n")
    monkeypatch.setattr("moetier.traces.geometry.files", lambda package: tmp_path)
    with pytest.raises(InputError, match=r"bad.yaml: \('n_experts',\): .*greater than or equal"):
        load_geometry.__wrapped__("bad")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_k": 5}, "top_k 5 is above n_experts 4"),
        ({"moe_layers": [2, 1]}, "ascending and without repeats"),
        ({"moe_layers": [1, 1]}, "ascending and without repeats"),
        ({"n_layers": 2}, "MoE layer 2 is beyond n_layers 2"),
        ({"depth": 2}, "Extra inputs are not permitted"),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Geometry(**{**SMALL, **change})


def test_the_size_of_an_unsized_expert_is_refused_not_guessed() -> None:
    with pytest.raises(InputError, match="the size of an expert of 'small' is unknown"):
        _ = Geometry(**SMALL).expert_weights


def test_attention_repeats_its_pattern() -> None:
    geometry = Geometry(**SMALL, attention=["sliding", "full"])

    assert [geometry.attention_of(i) for i in range(3)] == ["sliding", "full", "sliding"]
    assert Geometry(**SMALL).attention_of(7) == "full"
