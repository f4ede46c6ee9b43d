"""Tests of `moetier evaluate`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Invoke = Callable[..., Any]
WriteYaml = Callable[..., Path]


@pytest.fixture
def config(write_yaml: WriteYaml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOETIER_CACHE", str(tmp_path / "plain"))
    keys = {
        "live": "moe-tiny",
        "hardware": "phone-ufs4",
        "capacity": {"dram": "25 %"},
        "evaluate": {"items": 2, "long_prompts": 1, "long_tokens": 48},
    }
    return write_yaml(keys)


@pytest.fixture
def models() -> None:
    """Skip where torch and transformers are not installed."""
    pytest.importorskip("torch", reason="a live model needs the extra 'models'")
    pytest.importorskip("transformers", reason="a live model needs the extra 'models'")


@pytest.mark.slow
def test_json_is_all_of_stdout(models: None, moetier: Invoke, config: Path) -> None:
    found = json.loads(moetier("evaluate", config, "--json", "--items", 3).stdout)

    assert found["items"] == 3
    assert isinstance(found["accuracy"], float)
    assert found["lossless"] is True
    assert set(found["nll_difference"]) == {"mean", "low", "high", "n"}
    assert {"accuracy_se", "accuracy_by_task", "nll", "repetition_share", "tpot_ms"} <= set(found)


@pytest.mark.slow
def test_people_get_a_table_and_the_difference_to_the_plain_model(
    models: None, moetier: Invoke, config: Path
) -> None:
    text = moetier("evaluate", config, "--set", "policy.miss=skip").stdout

    assert "moe-tiny on phone-ufs4" in text
    assert "lossy: it alters the model's output" in text
    assert "against the plain model" in text
    assert "loops in long texts: " in text
    assert "add " in text


@pytest.mark.slow
def test_prompts_without_answers_are_shown_without_accuracy(
    models: None, moetier: Invoke, config: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("add 1,2=\n")
    sets = [f"evaluate.prompts={prompts}", "evaluate.max_new_tokens=2", "evaluate.long_prompts=0"]
    text = moetier("evaluate", config, *(w for s in sets for w in ("--set", s))).stdout

    assert "against the plain model" not in text
    assert "loops" not in text
    assert "time to first token" in text


@pytest.mark.slow
def test_out_holds_records_result_and_config(
    models: None, moetier: Invoke, config: Path, tmp_path: Path
) -> None:
    out = tmp_path / "o"
    moetier("evaluate", config, "--out", out)

    assert {path.name for path in out.iterdir()} == {
        "config.yaml",
        "records.parquet",
        "result.json",
    }
    again = yaml.safe_load((out / "config.yaml").read_text())
    assert again["live"] == "moe-tiny"
    assert again["evaluate"]["items"] == 2


def test_a_broken_promise_is_exit_status_1(
    moetier: Invoke, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moetier.experiments import live_runs

    failure = "policy 'x' says it is lossless, but the logits of item 1 are not"
    monkeypatch.setattr(
        live_runs, "run_live", lambda *_, **__: ({"lossless": False, "accuracy": 1.0}, failure)
    )
    result = moetier("evaluate", config, "--json", status=1)

    assert json.loads(result.stdout) == {"lossless": False, "accuracy": 1.0}
    assert f"error: {failure}" in result.stderr


def test_a_run_without_a_model_is_sent_elsewhere(
    moetier: Invoke, write_yaml: WriteYaml, run_keys: dict[str, Any]
) -> None:
    path = write_yaml(run_keys)
    result = moetier("evaluate", path, status=2)

    assert f"{path}: names no live model, so there is nothing to ask" in result.stderr
    assert "or use `moetier simulate`" in result.stderr


def test_simulate_sends_a_live_model_here(moetier: Invoke, config: Path) -> None:
    result = moetier("simulate", config, status=2)

    assert "live: a live model is not simulated but run; use `moetier evaluate`" in result.stderr


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--set", "policy=belady"), "policy: 'belady' is an oracle"),
        (("--set", "live=nowhere"), "live: nowhere: no such file"),
        (("--set", "evaluate.batch=2"), "evaluate.batch: unknown key"),
    ],
)
def test_bad_input_is_exit_status_2(
    models: None, moetier: Invoke, config: Path, words: tuple[str, ...], problem: str
) -> None:
    assert problem in moetier("evaluate", config, *words, status=2).stderr


def test_nothing_is_left_behind_by_a_run_that_fails(
    models: None, moetier: Invoke, config: Path, tmp_path: Path
) -> None:
    moetier("evaluate", config, "--items", 10**6, "--out", tmp_path / "o", status=2)

    assert not (tmp_path / "o").exists()


def test_a_dry_run_of_a_live_sweep_does_not_guess(
    moetier: Invoke, config: Path, write_yaml: WriteYaml, tmp_path: Path
) -> None:
    base = yaml.safe_load(config.read_text())
    sweep = {"name": "s", "base": base, "sweep": {"policy": ["on-demand", {"miss": "skip"}]}}
    result = moetier("sweep", write_yaml(sweep, "s.yaml"), "--dry-run", "--out", tmp_path / "o")

    assert "2 points, 0 of them done" in result.stdout
    assert "estimated time: unknown: a live model runs" in result.stdout


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_tasks_of_lm_eval_stand_beside_the_figures_of_the_run(
    moetier: Invoke, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    root = Path(__file__).parents[3]
    monkeypatch.chdir(root)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    task = root / "tests/validate/lm_eval/tiny_choices.yaml"
    result = moetier("evaluate", config, "--lm-eval", task, "--items", "2", "--json")
    told = json.loads(result.stdout)

    assert set(told["lm_eval"]["tiny_choices"]["acc,none"]) == {
        "value",
        "stderr",
        "plain",
        "difference",
    }
    assert told["items"] == 2
    assert told["tpot_ms"] > 0
    assert told["provenance"]["lm_eval"] == "0.4.13"
