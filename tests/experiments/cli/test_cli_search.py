"""Tests of `moetier search` and of `moetier simulate --headroom`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

Invoke = Callable[..., Any]
WriteYaml = Callable[..., Path]


@pytest.fixture
def config(write_yaml: WriteYaml, run_keys: dict[str, Any]) -> Path:
    space = {"eviction": ["lru", "layer-lfu"], "capacity.dram": ["20 %", "40 %"]}
    return write_yaml(
        {
            "name": "small",
            "base": run_keys,
            "space": space,
            "objectives": {"tpot_ms": "minimise", "capacity.dram": "minimise"},
            "trials": 8,
        }
    )


def test_what_is_shown(moetier: Invoke, config: Path, tmp_path: Path) -> None:
    text = moetier("search", config, "--out", tmp_path / "o").stdout

    assert "8 trials (" in text
    assert "front: " in text
    assert "recommended (the front's nearest" in text
    assert "run it again: moetier simulate" in text
    assert (tmp_path / "o" / "pareto.png").stat().st_size > 1000
    again = moetier("simulate", tmp_path / "o" / "recommended.yaml").stdout
    assert "time per output token" in again


def test_json_says_all(moetier: Invoke, config: Path, tmp_path: Path) -> None:
    found = moetier("search", config, "--out", tmp_path / "o", "--trials", 4, "--json").stdout

    said = json.loads(found)
    assert said["trials"]["all"] == 4
    assert said["recommended"] in said["front"]
    assert said["command"].endswith("recommended.yaml")
    assert {"refused", "failed", "left_out", "rule", "closest", "folder"} <= set(said)


def test_nothing_feasible_ends_with_status_one(
    moetier: Invoke, config: Path, tmp_path: Path
) -> None:
    limit = ["--set", "constraints.miss_rate='<= 0'"]

    result = moetier("search", config, "--out", tmp_path / "o", *limit, status=1)

    assert "error: no trial meets miss_rate <= 0; the closest has miss_rate 0." in result.stderr
    assert "recommended (" not in result.stdout


def test_one_objective_needs_no_figure(moetier: Invoke, config: Path, tmp_path: Path) -> None:
    one = ["--set", "objectives=[tpot_ms]"]

    text = moetier("search", config, "--out", tmp_path / "o", *one).stdout

    assert "front: 1 policies" in text
    assert not (tmp_path / "o" / "pareto.png").exists()


@pytest.mark.parametrize("jobs", ["0", "-2"])
def test_a_senseless_number_of_processes(moetier: Invoke, config: Path, jobs: str) -> None:
    assert f"{jobs} processes" in moetier("search", config, "--jobs", jobs, status=2).stderr


def test_headroom_is_a_table(moetier: Invoke, write_yaml: WriteYaml, run_keys: Any) -> None:
    text = moetier("simulate", write_yaml(run_keys), "--headroom").stdout

    for row in ("this run", "Belady's eviction", "perfect prefetch", "roofline"):
        assert row in text


def test_headroom_is_a_key(
    moetier: Invoke, write_yaml: WriteYaml, run_keys: Any, tmp_path: Path
) -> None:
    path = write_yaml(run_keys)

    said = json.loads(
        moetier("simulate", path, "--headroom", "--json", "--out", tmp_path / "o").stdout
    )

    assert set(said["headroom"]) == {"own", "belady", "perfect_prefetch", "roofline"}
    assert said["headroom"]["own"]["tpot_ms"] == said["tpot_ms"]
    assert json.loads((tmp_path / "o" / "result.json").read_text()) == said
    assert "headroom" not in json.loads(moetier("simulate", path, "--json").stdout)


def test_headroom_of_a_live_model_is_refused(moetier: Invoke, write_yaml: WriteYaml) -> None:
    path = write_yaml({"live": "moe-tiny", "hardware": "phone-ufs4"})

    text = moetier("simulate", path, "--headroom", status=2).stderr

    assert "which a live model does not have" in text
