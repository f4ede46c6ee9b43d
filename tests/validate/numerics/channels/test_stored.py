"""Check that a model's sketches come back from their file, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from moetier.traces.capture.find import find_moe_layers
from moetier.traces.errors import InputError
from moetier.validate.numerics.channels.experts import ChannelExperts
from moetier.validate.numerics.channels.keep import TopK
from moetier.validate.numerics.channels.sketch import ChannelSettings
from moetier.validate.numerics.channels.stored import load_sketches, store_sketches

SETTINGS = ChannelSettings(rank=3)


@pytest.fixture
def model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"head_dim": 8}  # transformers takes it, but does not declare it
    config = transformers.Qwen3MoeConfig(
        **sizes,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        intermediate_size=16,
    )
    return transformers.Qwen3MoeForCausalLM(config).eval()


def test_sketches_survive_the_file(model: transformers.PreTrainedModel, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = tmp_path / "sketches.safetensors"
    store_sketches(model, path, SETTINGS, progress=lambda *done: seen.append(done))
    layers = find_moe_layers(model)
    loaded = load_sketches(model, path, SETTINGS, layers)
    x, ids = torch.randn(5, 32), torch.rand(5, 4).argsort(-1)[:, :2]
    weights = torch.rand(5, 2)

    assert seen == [(1, 2), (2, 2)]
    for where, back in zip(layers, loaded, strict=True):
        made = ChannelExperts.build(where, SETTINGS)
        for name, value in made.sketch.tensors().items():
            assert back.sketch.tensors()[name].equal(value), name
        assert back.forward(x, ids, weights, TopK(4)).out.equal(
            made.forward(x, ids, weights, TopK(4)).out
        )


def test_a_flipped_byte_is_refused(model: transformers.PreTrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "sketches.safetensors"
    store_sketches(model, path, SETTINGS)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    with pytest.raises(InputError, match="checksum"):
        load_sketches(model, path, SETTINGS, find_moe_layers(model))


def test_other_settings_are_refused(model: transformers.PreTrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "sketches.safetensors"
    store_sketches(model, path, SETTINGS)

    with pytest.raises(InputError, match=r"'rank': 3.*not with.*'rank': 4"):
        load_sketches(model, path, ChannelSettings(rank=4), find_moe_layers(model))


def test_another_model_is_refused(model: transformers.PreTrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "sketches.safetensors"
    store_sketches(model, path, SETTINGS)
    next(model.parameters()).data[0, 0] += 1

    with pytest.raises(InputError, match="not from this model"):
        load_sketches(model, path, SETTINGS, find_moe_layers(model))
