"""Tests of lm-evaluation-harness's tasks, asked with a policy inside moe-tiny."""

from __future__ import annotations

import importlib.util
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("lm_eval")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moetier.sim.hardware import load_profile
from moetier.sim.run import Setting
from moetier.traces.errors import InputError
from moetier.traces.samples import moe_tiny_path
from moetier.validate.evaluate import Evaluation, Loaded, evaluate
from moetier.validate.evaluate_arms import Extras
from moetier.validate.lm_eval import Tasks, asking

HERE = Path(__file__).parent / "lm_eval"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(scope="module")
def tiny() -> Loaded:
    folder = moe_tiny_path()
    return Loaded(
        AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    )


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The task files name their data from the root of the tree."""
    monkeypatch.chdir(HERE.parents[2])
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))


def asked(tiny: Loaded, policy: Any, *tasks: str, limit: int | None = 4) -> Evaluation:
    setting = Setting(
        profile=load_profile("phone-ufs4"), policy=policy, capacity={"dram": Fraction(1, 4)}
    )
    names = tuple(str(HERE / f"{task}.yaml") for task in tasks)
    return evaluate(tiny, setting, [], asking=asking(Tasks(names, limit)))


def likelihood(tiny: Loaded, prompt: str, answer: str) -> float:
    """Return ln(probability) of *answer*, in one pass over the whole text."""
    begin, whole = (tiny.tokenizer(text)["input_ids"] for text in (prompt, prompt + answer))
    with torch.no_grad():
        logits = tiny.model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
    return sum(float(logits[i - 1, whole[i]]) for i in range(len(begin), len(whole)))


@pytest.mark.slow
def test_likelihoods_are_those_of_one_pass_and_count_as_decode(tiny: Loaded) -> None:
    result = asked(tiny, "on-demand", "tiny_choices")
    lines = (HERE / "choices.jsonl").read_text().splitlines()[:4]
    items = [json.loads(line) for line in lines]
    wanted = [
        likelihood(tiny, item["prompt"], choice) for item in items for choice in item["choices"]
    ]
    tokens = [
        len(tiny.tokenizer(choice, add_special_tokens=False)["input_ids"])
        for item in items
        for choice in item["choices"]
    ]

    assert [-sum(output.nll) for output in result.outputs] == pytest.approx(wanted, abs=1e-3)
    assert result.metrics["tokens"] == sum(n - 1 for n in tokens)
    assert result.metrics["lossless"]
    assert result.failure is None
    assert result.metrics["items"] == 4
    best = [
        max(
            range(len(item["choices"])),
            key=lambda i: likelihood(tiny, item["prompt"], item["choices"][i]),
        )
        for item in items
    ]
    right = sum(b == item["gold"] for b, item in zip(best, items, strict=True)) / 4
    found = result.metrics["lm_eval"]["tiny_choices"]["acc,none"]
    assert found["value"] == found["plain"] == right
    assert found["difference"] == {"mean": 0, "low": 0, "high": 0, "n": 4}


@pytest.mark.slow
def test_a_lossy_policy_changes_scores_and_the_plain_model_stands_beside(tiny: Loaded) -> None:
    lossy = {"eviction": "lru", "miss": "skip"}
    result = asked(tiny, lossy, "tiny_generate", "tiny_rolling", limit=12)
    scores = result.metrics["lm_eval"]
    exact, bits = scores["tiny_generate"]["exact_match,none"], scores["tiny_rolling"]

    assert exact["plain"] == 1
    assert exact["value"] < 1
    assert exact["difference"]["mean"] == pytest.approx(exact["value"] - 1)
    assert bits["bits_per_byte,none"]["value"] > bits["bits_per_byte,none"]["plain"] > 0
    assert not result.metrics["lossless"]
    assert result.metrics["tpot_ms"] > 0
    assert any("max_gen_toks" in text for text in result.known_limitations)


def test_an_unknown_task_is_named(tiny: Loaded) -> None:
    with pytest.raises(InputError, match="unknown task 'nothing_at_all'"):
        evaluate(
            tiny,
            Setting(profile=load_profile("phone-ufs4"), policy="on-demand"),
            [],
            asking=asking(Tasks(("nothing_at_all",))),
        )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [("a.yaml", None, "no such file"), ("b.yaml", "x: 1\n", "has no `task: NAME`")],
)
def test_a_bad_task_file_is_named(
    tiny: Loaded, tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    setting = Setting(profile=load_profile("phone-ufs4"), policy="on-demand")
    with pytest.raises(InputError, match=rf"{name}: {message}"):
        evaluate(tiny, setting, [], asking=asking(Tasks((str(tmp_path / name),))))


def test_batches_are_refused(tiny: Loaded) -> None:
    setting = Setting(profile=load_profile("phone-ufs4"), policy="on-demand")
    with pytest.raises(InputError, match=r"evaluate\.batch_size: batches of 2"):
        evaluate(tiny, setting, [], Extras(batch_size=2), asking=asking(Tasks(("x",))))


def test_a_missing_package_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"not installed; `pip install moetier\[lm-eval\]`"):
        asking(Tasks(("x",)))
