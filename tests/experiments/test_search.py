"""Tests of running searches."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

pytest.importorskip("optuna")

from moetier.experiments import perform
from moetier.experiments.config import load_run
from moetier.experiments.pareto import front
from moetier.experiments.runs import run
from moetier.experiments.search import Found, run_search
from moetier.experiments.search_config import check_search, load_search
from moetier.experiments.store import Store
from moetier.experiments.sweep import SweepConfig, points_of, run_sweep
from moetier.traces.errors import InputError

FILES = ("results.csv", "front.csv", "recommended.yaml", "provenance.json", "search.yaml")


RUN = {
    "synthetic": {"geometry": "moe-tiny", "prompt": 4, "tokens": 12, "reuse": 0.5},
    "hardware": "phone-ufs4",
}


@pytest.fixture
def keys(run_keys: dict[str, Any]) -> dict[str, Any]:
    return search_keys(run_keys)


def search_keys(base: dict[str, Any]) -> dict[str, Any]:
    """Return a search over *base* of runs that take a few milliseconds."""
    return {
        "name": "small",
        "base": base,
        "space": {
            "eviction": ["lru", "layer-lfu", "slice-aware"],
            "prefetch": ["none", {"kind": "previous-token", "depth": [1, 2]}],
            "capacity.dram": {"low": "10 %", "high": "50 %", "step": "10 %"},
        },
        "objectives": ["tpot_ms", "capacity.dram"],
        "trials": 12,
        "batch": 6,
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Found]:
    """A search that is done, to look at."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, go(search_keys(RUN), folder)


def go(keys: dict[str, Any], folder: Path, **how: Any) -> Found:
    return run_search(check_search(keys, "s"), folder, **how)


def contents(folder: Path) -> dict[str, str]:
    """Return what a finished search wrote, without the name of its folder."""
    return {name: (folder / name).read_text().replace(str(folder), "DIR") for name in FILES}


def test_trials_are_counted_by_what_became_of_them(finished: tuple[Path, Found]) -> None:
    tmp_path, found = finished

    table = Store(tmp_path).results()
    assert found.trials["all"] == 12
    assert found.trials["failed"] == 0
    assert found.trials["different runs"] == len(table) == len(found.rows)
    assert sum(table["trials"].tolist()) + found.trials["refused"] == 12
    (reason,) = found.refused
    assert "experts have none here" in reason
    assert 0 < found.refused[reason] == found.trials["refused"]


def test_the_front_is_that_of_all_rows(finished: tuple[Path, Found]) -> None:
    tmp_path, found = finished

    points = [(row["tpot_ms"], row["capacity_bytes.dram"]) for row in found.rows]
    assert [row["on_front"] for row in found.rows] == front(points, ["lower", "lower"])
    table = pd.read_csv(tmp_path / "front.csv")
    assert table["key"].tolist() == [row["key"] for row in found.choice.front]
    assert table["tpot_ms"].tolist() == sorted(table["tpot_ms"].tolist())


def test_the_recommended_policy_is_a_run_with_the_same_records(
    finished: tuple[Path, Found],
) -> None:
    tmp_path, found = finished

    best = found.choice.best
    assert best is not None
    config = load_run(tmp_path / "recommended.yaml")
    stored = Store(tmp_path).point(best["key"])
    assert stored is not None
    again = run(config)
    assert again["provenance"] == stored["provenance"]  # the digest of the records among it
    assert again["tpot_ms"] == best["tpot_ms"]
    assert isinstance(config.policy, dict)
    assert config.policy["name"] == "small recommended"
    assert found.command == f"moetier simulate {tmp_path / 'recommended.yaml'}"


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["nsga2", "tpe", "random"])
def test_the_same_seed_gives_the_same_trials(
    sampler: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    keys["sampler"] = sampler
    for name in ("one", "two"):
        go(keys, tmp_path / name)
    go(keys | {"seed": 1}, tmp_path / "other")

    one, two, other = (contents(tmp_path / name) for name in ("one", "two", "other"))
    assert one == two
    assert one["results.csv"] != other["results.csv"]


@pytest.mark.slow
def test_two_processes_run_the_same_trials_as_one(keys: dict[str, Any], tmp_path: Path) -> None:
    go(keys, tmp_path / "one")
    go(keys, tmp_path / "two", jobs=2)

    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_what_is_there_is_not_run_again(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = go(keys, tmp_path)
    before = contents(tmp_path)
    monkeypatch.setattr(perform, "run_point", None)  # a call would fail
    heard: list[tuple[int, int]] = []

    second = go(keys, tmp_path, on_done=lambda *n: heard.append(n))

    assert second == first
    assert contents(tmp_path) == before
    assert heard == [(6, 12), (12, 12)]


def test_a_search_may_go_on(keys: dict[str, Any], tmp_path: Path) -> None:
    go(keys | {"trials": 6}, tmp_path / "two")
    go(keys, tmp_path / "two")
    go(keys, tmp_path / "one")

    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_a_result_that_is_lost_is_run_again(keys: dict[str, Any], tmp_path: Path) -> None:
    found = go(keys, tmp_path)
    before = contents(tmp_path)
    (tmp_path / "points" / f"{found.rows[0]['key']}.json").unlink()

    assert go(keys, tmp_path) == found
    assert contents(tmp_path) == before


def test_a_point_of_a_sweep_is_a_point_of_a_search(keys: dict[str, Any], tmp_path: Path) -> None:
    found = go(keys, tmp_path)
    best = found.choice.best
    assert best is not None
    policy = yaml.safe_load((tmp_path / "recommended.yaml").read_text())["policy"]
    grid = {"policy": [policy], "capacity.dram": [best["capacity.dram"]]}
    config = SweepConfig.model_validate({"name": "s", "base": keys["base"], "sweep": grid})

    shutil.copytree(tmp_path / "points", tmp_path / "swept" / "points")
    outcome = run_sweep(config, points_of(config, "s"), tmp_path / "swept")

    assert outcome.resumed == 1
    assert outcome.rows[0]["key"] == best["key"]


def test_limits_steer_and_decide(keys: dict[str, Any], tmp_path: Path) -> None:
    keys["constraints"] = {"byte_miss_rate": "<= 30 %"}

    found = go(keys, tmp_path)

    best = found.choice.best
    feasible = [row for row in found.rows if row["byte_miss_rate"] <= 0.3]
    assert best is not None
    assert best["tpot_ms"] == min(row["tpot_ms"] for row in feasible)
    assert [row["feasible"] for row in found.rows] == [row in feasible for row in found.rows]
    journal = (tmp_path / "journal.log").read_text()
    assert "byte_miss_rate <= 0.3" in journal  # the sampler knows


def test_where_nothing_is_feasible_the_closest_is_named(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    keys["constraints"] = {"miss_rate": "<= 0"}

    found = go(keys, tmp_path)

    assert (found.choice.best, found.choice.front, found.command) == (None, [], None)
    assert found.closest is not None
    assert found.closest["miss_rate"] == min(row["miss_rate"] for row in found.rows)
    assert not (tmp_path / "recommended.yaml").exists()


def test_an_objective_that_is_always_null_is_an_error(keys: dict[str, Any], tmp_path: Path) -> None:
    keys["objectives"] = ["accuracy", "tpot_ms"]

    with pytest.raises(InputError, match=r"objectives: accuracy is null in every trial; .*`live:`"):
        go(keys, tmp_path)


def test_a_space_in_which_nothing_runs_is_an_error(keys: dict[str, Any], tmp_path: Path) -> None:
    keys["space"] = {"capacity.dram": ["0.1 %", "0.2 %"]}

    with pytest.raises(InputError, match=r"space: no trial could be run: .*cannot hold the 4"):
        go(keys, tmp_path)


def test_another_search_does_not_go_into_the_same_folder(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    go(keys, tmp_path)
    keys["space"]["eviction"] = ["lru", "fifo"]

    with pytest.raises(InputError, match=r"holds a search with another space; use another --out"):
        go(keys, tmp_path)


def test_one_folder_is_for_one_process_at_a_time(keys: dict[str, Any], tmp_path: Path) -> None:
    with (tmp_path / "search.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        with pytest.raises(InputError, match="another search runs here"):
            go(keys, tmp_path)


def test_a_run_that_breaks_is_a_failure_and_is_tried_again(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: Any, **_more: Any) -> None:
        raise RuntimeError("no luck")

    with monkeypatch.context() as patch:
        patch.setattr(perform, "run", broken)
        with pytest.raises(InputError, match="no trial could be run: RuntimeError: no luck"):
            go(keys, tmp_path)

    found = go(keys, tmp_path / "again")
    assert found.failed == []


def test_a_torn_last_line_is_forgotten(keys: dict[str, Any], tmp_path: Path) -> None:
    whole = go(keys, tmp_path)
    before = contents(tmp_path)
    path = tmp_path / "journal.log"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-3]) + lines[-3][:9])

    assert go(keys, tmp_path) == whole
    assert contents(tmp_path) == before
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_the_kept_config_is_the_search(finished: tuple[Path, Found]) -> None:
    tmp_path, _ = finished

    about = json.loads((tmp_path / "provenance.json").read_text())
    assert (
        load_search(tmp_path / "search.yaml").config == check_search(search_keys(RUN), "s").config
    )
    assert "optuna" in about["versions"]
    assert about["rule"].startswith("the front's nearest")


def test_a_preset_may_be_chosen(
    keys: dict[str, Any], tmp_path: Path, make_run: Callable[..., Any]
) -> None:
    keys |= {"space": {"policy": ["on-demand", "previous-token"]}, "trials": 6}

    found = go(keys, tmp_path)

    assert {row["policy"] for row in found.rows} == {"on-demand", "previous-token"}
    by_name = {row["policy"]: row["tpot_ms"] for row in found.rows}
    assert by_name["previous-token"] == run(make_run(policy="previous-token"))["tpot_ms"]


def test_another_name_does_not_make_room_for_another_search(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    go(keys, tmp_path)
    before = contents(tmp_path)

    with pytest.raises(InputError, match=r"holds a search with another name, seed; use another"):
        go(keys | {"name": "other", "seed": 9}, tmp_path)

    assert contents(tmp_path) == before


def test_a_sweep_and_a_search_do_not_share_a_folder(keys: dict[str, Any], tmp_path: Path) -> None:
    config = SweepConfig(name="s", base=keys["base"], sweep={})
    run_sweep(config, points_of(config, "s"), tmp_path / "swept")
    go(keys, tmp_path / "searched")

    with pytest.raises(InputError, match="swept: holds a sweep; use another --out"):
        go(keys, tmp_path / "swept")
    with pytest.raises(InputError, match="searched: holds a search; use another --out"):
        run_sweep(config, points_of(config, "s"), tmp_path / "searched")


def test_nothing_is_recommended_where_nothing_is_good_enough(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "recommended.yaml").write_text("# of an earlier search\n")

    found = go(keys | {"constraints": {"tpot_ms": "<= 0.0001"}}, tmp_path)

    assert found.command is None
    assert not (tmp_path / "recommended.yaml").exists()


@pytest.mark.parametrize("damage", [b"\x00\x00\n", b"[3\n", b'{"op_code": 99}\n', b"{}\n"])
def test_a_damaged_journal_is_named_and_may_be_removed(
    damage: bytes, keys: dict[str, Any], tmp_path: Path
) -> None:
    go(keys, tmp_path)
    before = contents(tmp_path)
    journal = tmp_path / "journal.log"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:3], damage, *lines[3:]]))

    with pytest.raises(InputError, match=r"journal\.log: is damaged: .*; remove it"):
        go(keys, tmp_path)

    journal.unlink()
    go(keys, tmp_path)
    assert contents(tmp_path) == before
