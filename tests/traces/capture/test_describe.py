"""A geometry says what the configuration says, and None for the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from moetier.traces.capture.describe import describe, model_name  # needs torch
from moetier.traces.capture.probe import probe
from moetier.traces.geometry import Geometry

Build = Callable[..., Any]
EXPECTED: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"qk_norm": True, "norm_topk": True},
    "Olmoe": {"qk_norm": False},  # it normalises all heads together
    "Mixtral": {"qk_norm": False, "moe_layers": [0, 1], "attention": None, "sliding_window": None},
    "DeepseekV3": {
        "moe_layers": [1],
        "kv_lora": 8,
        "rope_dim": 4,
        "head_dim": 8,
        "shared_intermediate": 16,
        "dense_intermediate": 24,
    },
    "GptOss": {
        "attention": ["sliding", "full"],
        "sliding_window": 8,
        "norm_topk": True,
        "expert_biases": True,
    },
    "Gemma4": {"shared_intermediate": 24, "tied_embeddings": True, "sliding_window": 8},
    "Qwen3_5Moe": {
        "attention": ["linear", "linear", "linear", "full"],
        "shared_intermediate": 16,
    },
    "Lfm2Moe": {"moe_layers": [1, 2], "attention": ["linear", "full", "linear"]},
    "Jamba": {"moe_layers": [1, 3], "dense_intermediate": 24, "moe_intermediate": 24},
    "NemotronH": {
        "moe_layers": [2],
        "expert_matrices": 2,
        "shared_intermediate": 16,
        "attention": None,
        "unverified": ["attention: not one per layer"],
    },
    "Qwen3VLMoe": {"n_layers": 2, "hidden": 32, "vocab": 64},
}


def geometry_of(model: Any) -> Geometry:
    return describe(model, probe(model))


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_geometry(name: str, build: Build) -> None:
    geometry = geometry_of(build(name)).model_dump()

    assert {key: geometry[key] for key in EXPECTED[name]} == EXPECTED[name]
    assert (geometry["n_experts"], geometry["hidden"], geometry["heads"]) == (8, 32, 4)


def test_a_kind_of_attention_that_is_not_known_is_said_to_be(build: Build) -> None:
    model = build("GptOss")
    model.config.layer_types = ["sliding_attention", "spiral_attention"]
    found = describe(model, probe(build("GptOss")))

    assert found.attention is None
    assert found.unverified == ["attention: spiral_attention"]


def test_a_window_that_is_not_used_is_none(build: Build) -> None:
    model = build("Qwen3Moe")
    model.config.sliding_window, model.config.use_sliding_window = 8, False

    assert geometry_of(model).sliding_window is None


def test_a_name_holds_no_path_of_this_machine(build: Build, tmp_path: Path) -> None:
    model = build("Mixtral")
    names = []
    for path in ("", str(tmp_path), "owner/some-moe", "/was/on/another/machine"):
        model.config.name_or_path = path
        names.append(model_name(model))

    assert names == ["mixtral", tmp_path.name, "owner/some-moe", "machine"]
