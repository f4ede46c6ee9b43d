"""Tests of running sweeps."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import joblib
import pytest
import yaml
from joblib._parallel_backends import ThreadingBackend

from moetier.experiments import perform as performing
from moetier.experiments import sweep as module
from moetier.experiments.perform import check_backend
from moetier.experiments.store import Store
from moetier.experiments.sweep import (
    SweepConfig,
    check_plots,
    load_sweep,
    points_of,
    run_sweep,
)
from moetier.traces.errors import InputError

WriteYaml = Callable[..., Path]


def sweep_of(keys: dict[str, Any]) -> SweepConfig:
    return SweepConfig.model_validate(keys)


def go(keys: dict[str, Any], folder: Path, **more: Any) -> module.Outcome:
    config = sweep_of(keys)
    return run_sweep(config, points_of(config, "s"), folder, **more)


def test_every_point_becomes_a_row(sweep_keys: dict[str, Any], tmp_path: Path) -> None:
    outcome = go(sweep_keys, tmp_path)

    table = Store(tmp_path).results()
    assert len(outcome.rows) == len(table) == 6
    assert table["policy"].tolist() == ["on-demand"] * 2 + ["layer-lfu"] * 2 + ["belady"] * 2
    assert table["capacity.dram"].tolist() == ["25 %", "50 %"] * 3
    assert set(table["status"]) == {"done"}
    assert {"tpot_ms", "energy_breakdown.links", "oracle_gap", "key"} <= set(table.columns)


def test_config_and_provenance_lie_beside(sweep_keys: dict[str, Any], tmp_path: Path) -> None:
    outcome = go(sweep_keys, tmp_path)

    about = json.loads((tmp_path / "provenance.json").read_text())
    assert yaml.safe_load((tmp_path / "sweep.yaml").read_text())["sweep"] == sweep_keys["sweep"]
    assert set(about["fingerprints"]) == {row["key"] for row in outcome.rows}
    assert "moetier" in about["versions"]
    assert "the routing is synthetic" in about["known_limitations"]
    point = Store(tmp_path).point(outcome.rows[0]["key"])
    assert point is not None
    assert point["config"]["policy"]["eviction"] == "lru"


def test_the_kept_config_is_a_sweep_again(sweep_keys: dict[str, Any], tmp_path: Path) -> None:
    go(sweep_keys, tmp_path)

    again = load_sweep(tmp_path / "sweep.yaml")

    assert points_of(again, "again") == points_of(sweep_of(sweep_keys), "first")


def test_the_oracle_gap_is_a_difference_of_miss_rates(
    sweep_keys: dict[str, Any], tmp_path: Path
) -> None:
    rows = go(sweep_keys, tmp_path).rows

    for at in (0, 1):
        lru, lfu, belady = rows[at], rows[2 + at], rows[4 + at]
        assert belady["oracle_gap"] == 0
        assert lru["oracle_gap"] == lru["miss_rate"] - belady["miss_rate"] > 0
        assert lfu["oracle_gap"] == lfu["miss_rate"] - belady["miss_rate"]


@pytest.mark.parametrize(("weights", "bound"), [("bf16", False), ("q4_k_m", True)])
def test_a_gap_over_slices_of_mixed_sizes_is_called_a_bound(
    weights: str, bound: bool, sweep_keys: dict[str, Any], tmp_path: Path
) -> None:
    sweep_keys["base"]["weights"] = weights
    sweep_keys["base"]["synthetic"]["geometry"] = "olmoe-1b-7b"

    outcome = go(sweep_keys, tmp_path)

    about = json.loads((tmp_path / "provenance.json").read_text())
    assert outcome.failed == []
    assert {row["uniform_slices"] for row in outcome.rows} == {not bound}
    assert (module.BOUND in about["known_limitations"]) is bound


def test_done_points_are_not_run_again(
    sweep_keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = go(sweep_keys, tmp_path)

    def never(*args: Any, **more: Any) -> None:
        raise AssertionError("ran again")

    monkeypatch.setattr(performing, "run", never)
    second = go(sweep_keys, tmp_path)

    assert second.resumed == 6
    assert second.rows == first.rows


def test_a_longer_sweep_runs_what_is_new(sweep_keys: dict[str, Any], tmp_path: Path) -> None:
    go(sweep_keys, tmp_path)
    sweep_keys["sweep"]["capacity.dram"].append("75 %")
    heard: list[tuple[int, int]] = []

    outcome = go(sweep_keys, tmp_path, on_done=lambda done, total: heard.append((done, total)))

    assert outcome.resumed == 6
    assert heard == [(6, 9), (7, 9), (8, 9), (9, 9)]


def test_a_failed_point_is_kept_and_tried_again(sweep_keys: dict[str, Any], tmp_path: Path) -> None:
    sweep_keys["sweep"]["capacity.dram"] = ["1 KiB", "50 %"]

    outcome = go(sweep_keys, tmp_path)

    table = Store(tmp_path).results()
    assert table["status"].tolist() == ["failed", "done"] * 3
    assert "1 KiB cannot hold the 4 experts" in table["error"][0]
    assert table["tpot_ms"].isna().tolist() == [True, False] * 3
    assert len(outcome.failed) == 3
    assert outcome.failed[0].startswith("policy=on-demand, capacity.dram=1 KiB: capacity.dram: 1")
    assert go(sweep_keys, tmp_path).resumed == 3


def test_a_bug_is_kept_with_its_traceback(
    sweep_keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **more: Any) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(performing, "run", broken)

    outcome = go(sweep_keys, tmp_path)

    assert {row["error"] for row in outcome.rows} == {"ZeroDivisionError: by zero"}
    point = Store(tmp_path).point(outcome.rows[0]["key"])
    assert point is not None
    assert "test_sweep.py" in point["traceback"]


def test_equal_points_run_once(sweep_keys: dict[str, Any], tmp_path: Path) -> None:
    sweep_keys["sweep"] = {"policy": ["on-demand", {"eviction": "lru"}]}
    heard: list[tuple[int, int]] = []

    outcome = go(sweep_keys, tmp_path, on_done=lambda *of: heard.append(of))

    assert heard[-1] == (1, 1)
    assert [row["policy"] for row in outcome.rows] == ["on-demand", "lru"]
    assert outcome.rows[0]["key"] == outcome.rows[1]["key"]


def test_records_are_kept_on_request(sweep_keys: dict[str, Any], tmp_path: Path) -> None:
    without = go(sweep_keys, tmp_path)
    assert list((tmp_path / "records").iterdir()) == []

    outcome = go({**sweep_keys, "records": True}, tmp_path)

    assert outcome.resumed == 0
    assert len(list((tmp_path / "records").iterdir())) == 6
    assert outcome.rows == without.rows


@pytest.mark.slow
def test_processes_give_what_one_gives(sweep_keys: dict[str, Any], tmp_path: Path) -> None:
    alone = go(sweep_keys, tmp_path / "one")
    together = go(sweep_keys, tmp_path / "two", jobs=2)

    assert together.rows == alone.rows
    for name in ("results.csv", "results.parquet", "provenance.json"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


@pytest.mark.parametrize("backend", ["dask", "ray"])
def test_a_backend_that_is_not_installed_says_so(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(InputError, match=f"--backend: backend '{backend}' needs the package"):
        check_backend(backend)


@pytest.mark.parametrize("backend", ["dask", "ray"])
def test_a_cluster_is_used_as_joblib_asks(
    backend: Any, sweep_keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads stand in for the cluster: what is tested is that the points go there."""
    used: list[str] = []

    class Threads(ThreadingBackend):  # type: ignore[misc]  # joblib has no types
        def submit(self, *args: Any, **more: Any) -> Any:
            used.append(backend)
            return super().submit(*args, **more)

    cluster = SimpleNamespace(Client=nullcontext, register_ray=lambda: used.append("registered"))
    monkeypatch.setitem(sys.modules, "distributed", cluster)
    monkeypatch.setitem(sys.modules, "ray.util.joblib", cluster)
    joblib.register_parallel_backend(backend, Threads)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())

    outcome = go(sweep_keys, tmp_path, jobs=2, backend=backend)

    assert [row["status"] for row in outcome.rows] == ["done"] * 6
    assert backend in used
    assert ("registered" in used) is (backend == "ray")


def test_a_result_that_vanished_is_a_failed_row(
    sweep_keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(performing, "run_point", lambda *args: None)

    outcome = go(sweep_keys, tmp_path)

    assert {row["error"] for row in outcome.rows} == {"its result is not there"}
    assert len(outcome.failed) == 6


def test_loky_needs_nothing_more() -> None:
    check_backend("loky")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"nme": "x"}, "nme: unknown key; did you mean 'name'?"),
        ({"name": "a/b"}, "name: 'a/b' cannot name a folder"),
        ({"name": ".."}, "name: '..' cannot name a folder"),
        ({"sweep": {"seed": 3}}, "sweep.seed: expected a list of values, got 3"),
        ({"sweep": [1]}, "sweep: Input should be a valid dictionary, got [1]"),
        ({"plots": [{"kind": "pie"}]}, "plots.0.kind: Input should be 'pareto', 'line'"),
        ({"plots": [{"kind": "line", "z": 1}]}, "plots.0.z: unknown key; known: kind, x, y, hue"),
        ({"records": "maybe"}, "records: Input should be a valid boolean"),
    ],
)
def test_a_bad_sweep_names_the_key(
    changes: dict[str, Any], problem: str, sweep_keys: dict[str, Any], write_yaml: WriteYaml
) -> None:
    path = write_yaml({**sweep_keys, **changes})

    with pytest.raises(InputError) as caught:
        load_sweep(path)

    assert str(caught.value).startswith(str(path))
    assert problem in str(caught.value)


def test_a_run_is_no_sweep(run_keys: dict[str, Any], write_yaml: WriteYaml) -> None:
    with pytest.raises(InputError, match="this is one run, not a sweep; use `moetier simulate`"):
        load_sweep(write_yaml(run_keys))


def test_overrides_go_to_the_base_unless_they_name_the_sweep(
    sweep_keys: dict[str, Any], write_yaml: WriteYaml
) -> None:
    texts = ["seed=4", "name=other", "sweep.policy=[belady]", "synthetic.tokens=3"]

    config = load_sweep(write_yaml(sweep_keys), texts)

    assert config.base["seed"] == 4
    assert config.base["synthetic"]["tokens"] == 3
    assert config.name == "other"
    assert config.sweep["policy"] == ["belady"]


@pytest.mark.parametrize(
    ("plot", "problem"),
    [
        ({"kind": "line", "x": "capacity.dram", "y": "tpot_mss"}, "plots.0.y: no metric or config"),
        ({"kind": "line", "x": "capacity.hbm", "y": "tpot_ms"}, "did you mean 'capacity.dram'?"),
        ({"kind": "pareto", "x": "tpot_ms", "y": "miss_rate", "hue": "zzzz"}, "docs/metrics.md"),
    ],
)
def test_a_plot_of_nothing_is_refused_before_the_sweep(
    plot: dict[str, str], problem: str, sweep_keys: dict[str, Any]
) -> None:
    config = sweep_of({**sweep_keys, "plots": [plot]})

    with pytest.raises(InputError) as caught:
        check_plots(config, points_of(config, "s"), "s")

    assert problem in str(caught.value)


@pytest.mark.parametrize(
    "plot",
    [
        {"kind": "line", "x": "capacity.dram", "y": "energy_breakdown.links", "hue": "policy"},
        {"kind": "pareto", "x": "oracle_gap", "y": "accuracy"},
        {"kind": "breakdown", "y": "energy"},
        {"kind": "breakdown"},
    ],
)
def test_metrics_and_config_keys_can_be_drawn(
    plot: dict[str, str], sweep_keys: dict[str, Any]
) -> None:
    config = sweep_of({**sweep_keys, "plots": [plot]})

    check_plots(config, points_of(config, "s"), "s")
