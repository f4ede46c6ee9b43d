"""Tests of performing one run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moetier
from moetier.experiments.config import RunConfig, check_run
from moetier.experiments.runs import Digest, run, setting_of
from moetier.experiments.store import dump_json
from moetier.sim.hardware import load_profile
from moetier.sim.metrics import summarise
from moetier.sim.records import read_records
from moetier.traces.errors import InputError
from moetier.traces.geometry import load_geometry
from moetier.traces.io import write_trace
from moetier.traces.synthetic import Synthetic

CONTRACT = (
    "tpot_ms", "tpot_p95_ms", "ttft_ms", "tokens", "miss_rate", "byte_miss_rate",
    "hit_rate_cumulative", "hit_rate_decode", "bytes_read_total", "bytes_per_token", "stall_share",
    "copy_share", "energy_mj_per_token", "energy_breakdown", "peak_bytes", "accuracy", "lossless",
    "known_limitations", "config", "warnings",
)  # fmt: skip


def test_a_result_has_every_key_of_the_contract(make_run: Callable[..., RunConfig]) -> None:
    result = run(make_run())

    assert set(CONTRACT) <= set(result)
    assert result["tokens"] == 12
    assert result["accuracy"] is None
    assert result["lossless"] is True
    json.loads(dump_json(result))


def test_the_config_says_what_was_used(make_run: Callable[..., RunConfig]) -> None:
    result = run(make_run())

    assert result["config"]["weights"] == "bf16"
    assert result["config"]["tiers"] == ["dram", "flash"]
    assert result["capacity_bytes"] == {"dram": result["expert_bytes_total"] // 4}
    assert result["provenance"]["moetier"] == moetier.__version__


def test_overlap_is_a_key_of_a_run_and_shortens_waits(make_run: Callable[..., RunConfig]) -> None:
    plain, overlapped = run(make_run()), run(make_run(overlap=True))

    assert plain["config"]["overlap"] is False
    assert overlapped["config"]["overlap"] is True
    assert overlapped["tpot_ms"] < plain["tpot_ms"]
    assert overlapped["time_breakdown_ms"]["expert"] == plain["time_breakdown_ms"]["expert"]
    assert overlapped["bytes_read_total"] == plain["bytes_read_total"]


def test_the_resolved_config_gives_the_same_run(make_run: Callable[..., RunConfig]) -> None:
    first = run(make_run(policy="previous-token"))

    second = run(check_run(first["config"], "again"))

    assert second == first


def test_metrics_are_those_of_the_records(
    tmp_path: Path, make_run: Callable[..., RunConfig]
) -> None:
    path = tmp_path / "records.parquet"
    result = run(make_run(), records=path)

    again = summarise(list(read_records(path)))

    assert {name: result[name] for name in again} == again


def test_warmup_steps_are_left_out(make_run: Callable[..., RunConfig]) -> None:
    whole = run(make_run())
    warm = run(make_run(measure={"warmup_steps": 5}))

    assert warm["tokens"] == whole["tokens"] - 5


def test_a_static_policy_uses_a_profile_trace(
    tmp_path: Path, make_run: Callable[..., RunConfig]
) -> None:
    tiny = load_geometry("moe-tiny")
    other = write_trace(Synthetic(tiny, tokens=40, skew=2.0, seed=9), tmp_path / "p.parquet")
    blind = run(make_run(policy="fiddler", policy__miss="fetch"))

    informed = run(make_run(popularity=str(other)))

    assert informed["provenance"]["records"] != blind["provenance"]["records"]


@pytest.mark.parametrize("what", ["records", "timeline"])
def test_a_failed_run_leaves_no_file(
    what: str, tmp_path: Path, make_run: Callable[..., RunConfig]
) -> None:
    config = make_run(capacity={"dram": "1 KiB"})
    more: dict[str, Any] = {what: tmp_path / "x"}

    with pytest.raises(InputError, match=r"^c\.yaml: capacity\.dram: 1 KiB cannot hold the 4"):
        run(config, where="c.yaml", **more)

    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_named(
    tmp_path: Path, make_run: Callable[..., RunConfig]
) -> None:
    with pytest.raises(InputError, match=r"directory '.*gone' does not exist; create it first"):
        run(make_run(), timeline=tmp_path / "gone" / "t.json")


def test_steps_are_told(make_run: Callable[..., RunConfig]) -> None:
    steps: list[int] = []

    run(make_run(), on_step=steps.append)

    assert steps == list(range(13))


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"seed": 4}, "seed", 4),
        ({"measure": {"warmup_steps": 3}}, "warmup_steps", 3),
        ({"kv_bytes": 1}, "kv_bytes", 1),
        ({"weights": "q4_0"}, "weights", "q4_0"),
        ({"tiers": ["dram", "flash"]}, "tiers", ["dram", "flash"]),
        ({"policy": "belady"}, "policy", "belady"),
    ],
)
def test_every_key_reaches_the_simulator(
    changes: dict[str, Any], name: str, value: Any, make_run: Callable[..., RunConfig]
) -> None:
    setting = setting_of(make_run(**changes), load_profile("phone-ufs4"))

    assert getattr(setting, name) == value


def test_a_digest_tells_records_apart() -> None:
    def of(*blocks: list[int]) -> str:
        digest = Digest()
        for block in blocks:
            digest({"step": np.array(block, np.int64)})
        return digest.hex()

    assert of([1, 2]) == of([1, 2])
    assert of([1, 2]) != of([2, 1])
    assert of([1], [2]) == of([1, 2])
