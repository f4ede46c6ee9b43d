"""Check the checkpoint that is shipped: small, ordinary, loaded offline, good at its tasks."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from moetier.traces import samples
from moetier.traces.samples import moe_tiny_path
from moetier.traces.samples.tasks import ALPHABET, held_out_items
from moetier.validate.accuracy import answer_scores, exact_match

MIB = 2**20


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    kept = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(kept)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(moe_tiny_path(), dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(moe_tiny_path())


def test_it_is_small() -> None:
    sizes = [path.stat().st_size for path in moe_tiny_path().iterdir()]

    assert sum(sizes) <= 30 * MIB


def test_it_has_the_files_of_an_ordinary_checkpoint() -> None:
    names = {path.name for path in moe_tiny_path().iterdir()}

    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_it_is_stored_in_bfloat16() -> None:
    with safe_open(moe_tiny_path() / "model.safetensors", framework="pt") as weights:
        types = {weights.get_tensor(name).dtype for name in weights.keys()}  # noqa: SIM118

    assert types == {torch.bfloat16}


def test_the_configuration_has_the_published_constants() -> None:
    config = json.loads((moe_tiny_path() / "config.json").read_text())

    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["num_hidden_layers"] == samples.MOE_TINY_LAYERS
    assert config["num_local_experts"] == samples.MOE_TINY_EXPERTS
    assert config["num_experts_per_tok"] == samples.MOE_TINY_TOP_K
    assert config["hidden_size"] == samples.MOE_TINY_HIDDEN
    assert config["moe_intermediate_size"] == samples.MOE_TINY_EXPERT_HIDDEN
    assert config["norm_topk_prob"]
    assert config["tie_word_embeddings"]
    assert config["max_position_embeddings"] >= 512


def test_it_loads_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    loaded = AutoModelForCausalLM.from_pretrained(moe_tiny_path(), dtype=torch.float32)
    characters = AutoTokenizer.from_pretrained(moe_tiny_path())

    assert loaded.dtype == torch.float32
    assert len(characters.encode(ALPHABET)) == len(ALPHABET)


def test_it_answers(model: Any, tokenizer: Any) -> None:
    prompt = tokenizer("rev abcd=", return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=8)

    assert tokenizer.decode(output[0]) == "rev abcd=dcba\n"


@pytest.mark.slow
def test_it_is_accurate_on_held_out_items(model: Any, tokenizer: Any) -> None:
    accuracy = exact_match(model, tokenizer, held_out_items(30))

    assert accuracy.overall.mean >= 0.98
    assert all(task.mean >= 0.9 for task in accuracy.by_task.values())


@pytest.mark.slow
def test_greedy_scores_say_what_generation_writes(model: Any, tokenizer: Any) -> None:
    items = held_out_items(20)
    scores = answer_scores(model, tokenizer, items)
    accuracy = exact_match(model, tokenizer, items)

    assert tuple(score.greedy for score in scores) == accuracy.correct
