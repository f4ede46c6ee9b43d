"""Tests of `moetier simulate`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from moetier.experiments.config import load_run
from moetier.experiments.runs import run
from moetier.traces.geometry import load_geometry
from moetier.traces.io import write_trace
from moetier.traces.synthetic import Synthetic

Invoke = Callable[..., Any]
WriteYaml = Callable[..., Path]


@pytest.fixture
def config(write_yaml: WriteYaml, run_keys: dict[str, Any]) -> Path:
    return write_yaml(run_keys)


def test_json_goes_to_stdout_alone(moetier: Invoke, config: Path) -> None:
    result = moetier("simulate", config, "--json")

    assert json.loads(result.stdout) == run(load_run(config))
    assert result.stderr == ""


def test_the_table_shows_metrics_denominators_and_assumptions(
    moetier: Invoke, config: Path
) -> None:
    text = moetier("simulate", config).stdout

    assert "synthetic moe-tiny on phone-ufs4, bf16, 12 tokens" in text
    assert "dram: 6 MiB for experts, 25.0% of all" in text
    assert "time per output token" in text
    assert "decode bytes looked up" in text
    assert "policy: on-demand (lossless)" in text
    assert "assumed: time and energy are modelled, not measured" in text
    assert "accuracy" not in text  # not known, so not shown


def test_warnings_are_shown(moetier: Invoke, config: Path) -> None:
    text = moetier("simulate", config, "--set", "capacity.dram=5 %").stdout

    assert "warning: LRU cliff: one token's experts take 3 MiB" in text


def test_a_lossy_policy_is_called_so(moetier: Invoke, config: Path) -> None:
    text = moetier("simulate", config, "--set", "policy.miss=skip").stdout

    assert "policy: miss=skip" in text
    assert "lossy: it alters the model's output" in text
    assert "`moetier evaluate`" in text


def test_a_trace_is_named(moetier: Invoke, write_yaml: WriteYaml, tmp_path: Path) -> None:
    trace = write_trace(Synthetic(load_geometry("moe-tiny"), tokens=3), tmp_path / "my[1].parquet")
    path = write_yaml({"trace": str(trace), "hardware": "phone-ufs4"})

    assert "my[1].parquet" in moetier("simulate", path).stdout.replace("\n", "")


def test_overrides_apply(moetier: Invoke, config: Path) -> None:
    words = ("--set", "policy.eviction=lfu", "--set", "synthetic.tokens=5", "--json")

    found = json.loads(moetier("simulate", config, *words).stdout)

    assert found["tokens"] == 5
    assert found["config"]["policy"]["eviction"] == {"kind": "lfu", "remember": True}


def test_a_folder_gets_records_result_and_config(
    moetier: Invoke, config: Path, tmp_path: Path
) -> None:
    out = tmp_path / "deep" / "out"

    printed = json.loads(moetier("simulate", config, "--out", out, "--json").stdout)

    assert sorted(path.name for path in out.iterdir()) == [
        "config.yaml",
        "records.parquet",
        "result.json",
    ]
    assert json.loads((out / "result.json").read_text()) == printed
    assert yaml.safe_load((out / "config.yaml").read_text()) == printed["config"]
    assert json.loads(moetier("simulate", out / "config.yaml", "--json").stdout) == printed


def test_a_timeline_is_written(moetier: Invoke, config: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.json"

    moetier("simulate", config, "--timeline", path)

    assert json.loads(path.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("hardwear=x", "hardwear: unknown key; did you mean 'hardware'?"),
        ("capacity.dram=25", "capacity.dram: expected a size such as '2 GiB' or a share such as"),
        ("capacity.dram=0 %", "capacity.dram: must be above zero, got '0 %'"),
        ("capacity.dram=-1 GiB", "capacity.dram: a size cannot be negative, got '-1 GiB'"),
        ("capacity.dram=1 KiB", "capacity.dram: 1 KiB cannot hold the 4 experts"),
        ("capacity.dram=200 GiB", "capacity.dram: 200 GiB of experts do not fit in 'dram'"),
        ("capacity.hbm=1 GiB", "capacity: 'hbm' is not a cached tier; use dram"),
        ("policy=lru-ish", "policy: unknown policy 'lru-ish'; presets: on-demand"),
        ("hardware=phone", "hardware: unknown hardware 'phone'"),
        ("synthetic.geometry=gpt-9", "synthetic.geometry: unknown model 'gpt-9'; known:"),
        ("trace=x.parquet", "expected one routing source of trace, synthetic, live, got trace and"),
        ("synthetic=null", "expected one routing source of trace, synthetic, live, got none"),
        ("popularity=x.parquet", "popularity: x.parquet: no such file; paths go from"),
        ("seed=[", "--set seed: '[' is not valid YAML"),
        ("seed", "--set: 'seed' has no value; write --set key=value"),
    ],
)
def test_bad_input_is_a_message_and_status_2(
    setting: str, problem: str, moetier: Invoke, config: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    result = moetier("simulate", config, "--set", setting, "--out", out, status=2)

    assert problem in result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert not out.exists()


def test_a_missing_file_is_named(moetier: Invoke) -> None:
    result = moetier("simulate", "nowhere.yaml", status=2)

    assert result.stderr.startswith("error: nowhere.yaml: no such file")


def test_a_live_model_is_sent_elsewhere(moetier: Invoke, write_yaml: WriteYaml) -> None:
    path = write_yaml({"live": "some/model", "hardware": "phone-ufs4"})

    assert "use `moetier evaluate`" in moetier("simulate", path, status=2).stderr


def test_an_out_that_is_a_file_is_refused(moetier: Invoke, config: Path) -> None:
    result = moetier("simulate", config, "--out", config, status=2)

    assert "cannot be made" in result.stderr
    assert config.read_text()


def test_what_is_left_out_is_shown_and_only_then(moetier: Invoke, config: Path) -> None:
    plain = moetier("simulate", config).stdout
    skipping = moetier("simulate", config, "--set", "policy={miss: skip}").stdout

    assert "skipped" not in plain
    assert "skipped" in skipping
