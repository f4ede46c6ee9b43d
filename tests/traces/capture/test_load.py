"""Loaded from files: what the bytes, the name and the fingerprint say, also when offloaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moetier.traces import formats
from moetier.traces.capture import capture_model
from moetier.traces.errors import InputError
from moetier.traces.io import TraceReader

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from moetier.traces.capture.describe import describe  # noqa: E402  # needs torch
from moetier.traces.capture.find import find_moe_layers  # noqa: E402
from moetier.traces.capture.fingerprint import fingerprint  # noqa: E402
from moetier.traces.capture.load import load_model  # noqa: E402
from moetier.traces.capture.nbytes import (  # noqa: E402
    dense_bytes,
    dense_layer_bytes,
    expert_bytes,
    stored_dtype,
)
from moetier.traces.capture.probe import probe  # noqa: E402
from moetier.traces.capture.run import capture  # noqa: E402

Build = Callable[..., Any]
PROMPTS = ["one two three four", "five six"]


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *" ".join(PROMPTS).split()]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


@pytest.fixture
def checkpoint(tmp_path: Path, build: Build) -> Path:
    folder = tmp_path / "tiny-moe"
    build("Qwen3Moe").to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def test_a_checkpoint_is_captured_in_the_type_it_is_stored_in(
    checkpoint: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
    out = capture_model(str(checkpoint), prompts, tmp_path / "t.parquet", max_new_tokens=3)
    reader = TraceReader(out)
    header = reader.header

    assert reader.validate() > 0
    assert header.weights == "bf16"
    assert header.expert_bytes == {"bf16": [3 * 32 * 16 * 2] * 2}
    assert header.provenance.model == header.geometry.name == "tiny-moe"
    assert header.provenance.dtype == "bfloat16"
    assert str(tmp_path) not in header.model_dump_json()


def test_stored_bytes_count_whatever_it_is_loaded_in(checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM

    stored = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    wide = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    layers, wide_layers = find_moe_layers(stored), find_moe_layers(wide)

    assert stored_dtype(wide, wide_layers) == torch.bfloat16
    assert expert_bytes(wide_layers, torch.bfloat16) == expert_bytes(layers, torch.bfloat16)
    assert dense_bytes(wide_layers, torch.bfloat16) == dense_bytes(layers, torch.bfloat16)


def test_a_model_in_memory_counts_as_it_is(build: Build) -> None:
    model = build("GptOss")
    layers = find_moe_layers(model)

    assert stored_dtype(model, layers) == torch.float32
    one = 3 * 32 * 16 + 2 * 16 + 32  # matrices and biases
    assert expert_bytes(layers, torch.float32) == [4 * one] * 2


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "Glm4Moe"])  # without biases
def test_counted_bytes_are_those_that_the_geometry_gives(name: str, build: Build) -> None:
    model = build(name).to(torch.bfloat16)
    found = probe(model)
    geometry = describe(model, found)

    assert expert_bytes(found.layers, torch.bfloat16) == formats.expert_bytes(geometry, "bf16")
    assert dense_bytes(found.layers, torch.bfloat16) == formats.dense_bytes(geometry, "bf16")
    others = dense_layer_bytes(model, found.layers, torch.bfloat16)
    assert others == formats.dense_layer_bytes(geometry, "bf16")


def test_the_fingerprint_says_the_same_of_a_copy_and_not_of_another(
    checkpoint: Path, build: Build
) -> None:
    model = build("Qwen3Moe").to(torch.bfloat16)
    copy, _ = load_model(str(checkpoint))
    name = fingerprint(model)

    assert len(name) == 64
    assert fingerprint(copy) == name
    assert fingerprint(build("Qwen3Moe", seed=1).to(torch.bfloat16)) != name
    with torch.no_grad():
        copy.model.layers[1].mlp.experts.down_proj[3, 2, 1] += 1
    assert fingerprint(copy) != name
    model.config.rms_norm_eps *= 2
    assert fingerprint(model) != name


def test_weights_offloaded_to_disk_are_captured_the_same(
    checkpoint: Path, tmp_path: Path, tokenizer: Any
) -> None:
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    here, _ = load_model(str(checkpoint))
    places = {
        "model.embed_tokens": "cpu",
        "model.rotary_emb": "cpu",
        "model.norm": "cpu",
        "lm_head": "cpu",
        "model.layers.0": "disk",
        "model.layers.1": "disk",
    }
    away = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype="auto", device_map=places, offload_folder=tmp_path / "offload"
    )
    files = [
        capture(model, tokenizer, PROMPTS, tmp_path / name, max_new_tokens=3).read_bytes()
        for model, name in ((here, "here.parquet"), (away, "away.parquet"))
    ]

    assert away.model.layers[0].mlp.experts.down_proj.device.type == "meta"
    assert files[0] == files[1]


def test_a_device_map_is_passed_on(checkpoint: Path) -> None:
    pytest.importorskip("accelerate")
    model, _ = load_model(str(checkpoint), "auto")

    assert model.device.type in ("cpu", "cuda")
    assert not model.training


def test_a_model_that_also_reads_images_is_captured(
    tmp_path: Path, build: Build, tokenizer: Any
) -> None:
    build("Qwen3VLMoe").save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    model, _ = load_model(str(tmp_path))
    out = capture(model, tokenizer, PROMPTS, tmp_path / "t.parquet", max_new_tokens=2)

    assert type(model).__name__ == "Qwen3VLMoeForConditionalGeneration"
    assert TraceReader(out).validate() > 0


@pytest.mark.parametrize("content", [{}, {"model_type": "no-such-family"}])
def test_a_folder_that_is_no_checkpoint_is_refused(content: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))

    with pytest.raises(InputError, match="cannot be loaded"):
        load_model(str(tmp_path))


def test_importing_the_package_is_light() -> None:
    import subprocess
    import sys

    code = "import sys, moetier.traces.capture; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"
