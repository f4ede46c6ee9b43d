"""Tests of runs inside a live model, and of what names them in a sweep."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moetier.experiments import live_runs
from moetier.experiments.config import RunConfig, check_run
from moetier.experiments.live_runs import (
    cache_folder,
    checkpoint,
    checkpoint_fingerprint,
    live_key,
    questions_of,
    run_live,
)
from moetier.experiments.points import key_of
from moetier.experiments.resolve import resolved
from moetier.experiments.runs import run
from moetier.experiments.store import Store
from moetier.experiments.sweep import Outcome, SweepConfig, check_plots, points_of, run_sweep
from moetier.traces.errors import InputError
from moetier.traces.samples import moe_tiny_path

KEYS = {
    "live": "moe-tiny",
    "hardware": "phone-ufs4",
    "capacity": {"dram": "25 %"},
    "evaluate": {"items": 3, "long_prompts": 0},
}


@pytest.fixture(autouse=True)
def kept_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep runs of the plain model in a folder of the test."""
    monkeypatch.setenv("MOETIER_CACHE", str(tmp_path / "plain"))


@pytest.fixture
def models() -> None:
    """Skip where torch and transformers are not installed."""
    pytest.importorskip("torch", reason="a live model needs the extra 'models'")
    pytest.importorskip("transformers", reason="a live model needs the extra 'models'")


def config_of(**changes: Any) -> RunConfig:
    return check_run({**KEYS, **changes}, "test")


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes what looks like a checkpoint."""

    def make(name: str = "model", weights: bytes = b"abc") -> Path:
        path = tmp_path / name
        path.mkdir(exist_ok=True)
        (path / "model.safetensors").write_bytes(weights)
        (path / "config.json").write_text("{}")
        return path

    return make


@pytest.mark.slow
def test_a_live_run_says_what_a_simulation_says_and_how_accurate(models: None) -> None:
    from moetier.validate import evaluate_plain

    evaluate_plain._memory.clear()
    result, failure = run_live(config_of())
    synthetic = {"geometry": "moe-tiny", "prompt": 2, "tokens": 2}
    other = run(check_run({"synthetic": synthetic, "hardware": "phone-ufs4"}, "test"))

    assert failure is None
    assert set(other) <= set(result)
    assert result["accuracy"] == 1
    assert result["lossless"] is True
    assert result["config"]["evaluate"]["items"] == 3
    assert result["config"]["live"] == "moe-tiny"
    assert result["provenance"]["source"] == checkpoint_fingerprint("moe-tiny")
    assert len(list(cache_folder().iterdir())) == 1
    assert check_run(result["config"], "again").evaluate == config_of().evaluate


@pytest.mark.slow
def test_records_are_written_and_their_digest_is_stable(models: None, tmp_path: Path) -> None:
    first, _ = run_live(config_of(), records=tmp_path / "r.parquet")
    second, _ = run_live(config_of())

    assert (tmp_path / "r.parquet").is_file()
    assert first["provenance"] == second["provenance"]


def test_without_torch_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(InputError, match=r"a live model needs torch, .*pip install moetier\[mo"):
        run_live(config_of())


def test_the_sample_is_known_by_name_and_others_by_path(folder: Callable[..., Path]) -> None:
    path = folder()

    assert checkpoint("moe-tiny") == moe_tiny_path()
    assert checkpoint(str(path)) == path


def test_no_checkpoint_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()

    with pytest.raises(InputError, match="live: nowhere: no such file"):
        checkpoint("nowhere")
    with pytest.raises(InputError, match="is not a folder; name a checkpoint folder, or 'moe-ti"):
        checkpoint(str(file))
    with pytest.raises(InputError, match="holds no checkpoint"):
        checkpoint_fingerprint(str(tmp_path))


def test_a_checkpoint_counts_by_content(folder: Callable[..., Path]) -> None:
    one, two = folder("one"), folder("two")
    first = checkpoint_fingerprint(str(one))

    assert checkpoint_fingerprint(str(two)) == first
    folder("two", b"abd")
    os.utime(two / "model.safetensors", ns=(1, 1))
    assert checkpoint_fingerprint(str(two)) != first


def test_a_key_follows_model_questions_and_policy(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("one\n")
    one, two = str(folder("one")), str(folder("two"))
    other = str(folder("other", b"xyz"))
    asked = {"items": 1, "prompts": str(prompts)}
    keys = [
        key_of(config_of(live=one)),
        key_of(config_of(live=other)),
        key_of(config_of(live=one, policy={"miss": "skip"})),
        key_of(config_of(live=one, evaluate={"items": 4})),
        key_of(config_of(live=one, evaluate=asked)),
    ]
    prompts.write_text("two\n")
    keys.append(key_of(config_of(live=one, evaluate=asked)))

    assert len(set(keys)) == len(keys)
    assert key_of(config_of(live=two)) == keys[0]
    assert key_of(config_of(live=one, name="x")) == keys[0]


def test_a_predictor_counts_by_kind_or_content(folder: Callable[..., Path], tmp_path: Path) -> None:
    live, file = str(folder()), tmp_path / "p.safetensors"
    file.write_bytes(b"abc")
    keys = [
        key_of(config_of(live=live)),
        key_of(config_of(live=live, predictor="router-reuse")),
        key_of(config_of(live=live, predictor={"kind": "router-reuse", "horizons": [1, 2]})),
        key_of(config_of(live=live, predictor=str(file))),
    ]
    file.write_bytes(b"abd")
    keys.append(key_of(config_of(live=live, predictor=str(file))))

    assert len(set(keys)) == len(keys)
    with pytest.raises(InputError, match=r"predictor: no\.safetensors: no such file"):
        key_of(config_of(live=live, predictor="no.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("predictor", ["router-reuse", {"kind": "router-reuse", "horizons": [1]}])
def test_a_predictor_runs_beside_the_model(models: None, predictor: Any) -> None:
    policy = {"prefetch": "predicted"}
    result, failure = run_live(config_of(policy=policy, predictor=predictor))

    assert failure is None
    assert result["lossless"] is True
    assert result["prefetch_issued"] > 0


def test_the_key_holds_the_versions_that_compute(models: None) -> None:
    assert {"checkpoint", "torch", "transformers"} == set(live_key(config_of()))


def test_questions_come_from_tasks_or_a_file(models: None, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": p, "answer": "x"}) for p in "abc"))

    assert len(questions_of(config_of())) == 3
    asked = questions_of(config_of(evaluate={"items": 2, "prompts": str(path)}))
    assert [(question.prompt, question.answer) for question in asked] == [("a", "x"), ("b", "x")]


def test_what_is_asked_is_checked(run_keys: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="`evaluate` says what a live model is asked"):
        check_run({**run_keys, "evaluate": {"items": 3}}, "test")
    with pytest.raises(InputError, match=r"evaluate\.items: .*greater than or equal to 1"):
        config_of(evaluate={"items": 0})
    with pytest.raises(InputError, match=r"evaluate\.prompts: no\.txt: no such file"):
        config_of(evaluate={"prompts": "no.txt"})


def test_an_oracle_is_refused_before_anything_runs() -> None:
    with pytest.raises(InputError, match="test: policy: 'belady' is an oracle"):
        config_of(policy="belady")


def test_other_runs_do_not_say_what_they_would_ask(run_keys: dict[str, Any]) -> None:
    assert "evaluate" not in resolved(check_run(run_keys, "test"))
    assert resolved(config_of())["evaluate"]["batch_size"] == 1


def test_the_cache_goes_where_it_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "plain"
    monkeypatch.delenv("MOETIER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "moetier" / "plain"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "moetier" / "plain"


def go(folder: Path, heard: list[tuple[int, int]] | None = None) -> Outcome:
    keys = {
        "name": "live",
        "base": KEYS,
        "sweep": {"policy": ["on-demand", {"miss": "skip"}]},
        "plots": [{"kind": "pareto", "x": "miss_rate", "y": "accuracy"}],
    }
    config = SweepConfig.model_validate(keys)
    points = points_of(config, "s")
    check_plots(config, points, "s")
    on_done = None if heard is None else lambda *x: heard.append(x)
    return run_sweep(config, points, folder, on_done=on_done)


@pytest.mark.slow
def test_a_sweep_has_accuracy_in_its_table_and_goes_on(models: None, tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    first = go(tmp_path / "s", heard)
    again = go(tmp_path / "s")

    table = Store(tmp_path / "s").results()
    assert [(row["status"], row["source"]) for row in first.rows] == [("done", "moe-tiny")] * 2
    assert table["lossless"].tolist() == [True, False]
    assert table["accuracy"].tolist()[0] == 1
    assert table["nll_difference.mean"].tolist()[0] == 0
    assert {"accuracy_se", "plain.accuracy", "accuracy_by_task.add"} <= set(table.columns)
    assert heard == [(0, 2), (1, 2), (2, 2)]
    assert again.resumed == 2


def test_a_point_that_was_not_lossless_after_all_has_failed(
    models: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moetier.experiments import perform

    def fake(config: RunConfig, **_: Any) -> tuple[dict[str, Any], str]:
        return {"accuracy": 1.0}, "says it is lossless, but"

    monkeypatch.setattr(perform, "run_live", fake)
    outcome = go(tmp_path / "s")

    assert [row["status"] for row in outcome.rows] == ["failed"] * 2
    assert "says it is lossless, but" in outcome.failed[0]


@pytest.mark.slow
def test_a_model_is_loaded_once_for_the_points_of_a_sweep(models: None) -> None:
    live_runs._load.cache_clear()
    for policy in ("on-demand", {"eviction": "lfu"}):
        run_live(config_of(policy=policy))

    assert live_runs._load.cache_info().misses == 1
