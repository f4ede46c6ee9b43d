"""Tests of reading folders of results, whole and broken ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from moetier.experiments.report.folder import plain, read_folder
from moetier.experiments.store import Store
from moetier.traces.errors import InputError


def test_a_sweep_is_read_with_all_that_its_points_say(finished: Path) -> None:
    folder = read_folder(finished)

    assert (folder.kind, folder.name, folder.notes) == ("sweep", "small", [])
    assert len(folder.entries) == len(folder.done) == 6
    first = folder.entries[0]
    assert first.policy == "on-demand"
    assert first.axes["capacity.dram"] == "25 %"
    assert first.metrics["tpot_ms"] == first.outcome["tpot_ms"]
    assert first.outcome["config"]["hardware"] == "phone-ufs4"
    assert {"status", "error", "warnings", "key"}.isdisjoint(first.metrics)


def test_metrics_are_plain_values(finished: Path) -> None:
    values = [value for entry in read_folder(finished).entries for value in entry.metrics.values()]

    assert {type(value) for value in values} <= {type(None), bool, int, float, str}
    assert not any(value != value for value in values)


def test_a_stopped_sweep_shows_what_it_left(sweep: Path) -> None:
    for name in ("results.parquet", "results.csv", "sweep.yaml", "provenance.json"):
        (sweep / name).unlink()
    keys = sorted(path.stem for path in (sweep / "points").glob("*.json"))
    (sweep / "points" / f"{keys[0]}.json").write_text("{")

    folder = read_folder(sweep)

    assert [entry.key for entry in folder.entries] == keys[1:]
    assert any("1 files in points/ cannot be read" in note for note in folder.notes)
    assert any("was stopped" in note and "5 points" in note for note in folder.notes)
    assert {entry.axes["capacity.dram"] for entry in folder.entries} == {"25 %", "50 %"}
    assert "on-demand" in {entry.policy for entry in folder.entries}


def test_a_failed_point_keeps_its_error(sweep: Path) -> None:
    table = pd.read_parquet(sweep / "results.parquet")
    table["error"] = table["error"].astype(object)
    table.loc[0, ["status", "error"]] = ["failed", "no such file"]
    table.to_parquet(sweep / "results.parquet")

    folder = read_folder(sweep)

    assert folder.entries[0].error == "no such file"
    assert len(folder.done) == 5


def test_points_of_an_earlier_sweep_are_left_out_and_counted(sweep: Path) -> None:
    Store(sweep).put("0" * 20, {"key": "0" * 20, "status": "done"})

    folder = read_folder(sweep)

    assert len(folder.entries) == 6
    assert any("1 points in points/" in note for note in folder.notes)


def test_lost_points_are_counted(sweep: Path) -> None:
    shutil.rmtree(sweep / "points")

    folder = read_folder(sweep)

    assert len(folder.done) == 6
    assert folder.entries[0].outcome == {}
    assert any("6 of 6 points are not in the folder" in note for note in folder.notes)


def test_an_empty_table_is_a_folder_without_points(sweep: Path) -> None:
    shutil.rmtree(sweep / "points")
    pd.read_parquet(sweep / "results.parquet").iloc[:0].to_parquet(sweep / "results.parquet")

    assert read_folder(sweep).entries == []


def test_a_run_is_a_folder_of_one_point(one_run: Path) -> None:
    folder = read_folder(one_run)

    (entry,) = folder.entries
    assert folder.kind == "simulate"
    assert entry.policy == "on-demand"
    assert entry.axes == {
        "policy": "on-demand", "hardware": "phone-ufs4", "source": "moe-tiny",
        "capacity.dram": "25 %",
    }  # fmt: skip
    assert entry.metrics["time_breakdown_ms.dense"] > 0
    assert not any(name.startswith("headroom") for name in entry.metrics)
    assert folder.headroom is not None


def test_a_validation_is_read_with_its_profile(validated: Path) -> None:
    folder = read_folder(validated)

    assert (folder.kind, folder.name, folder.entries) == ("validate", "on disk", [])
    assert folder.validation is not None
    assert len(folder.validation["points"]) == 3
    assert folder.profile is not None
    assert folder.profile["name"] == "this-disk"


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("validation.json", "[1]", "expected a mapping, got list"),
        ("validation.json", "{", "cannot be read"),
        ("validation.json", '{"points": 3}', "holds no list of points"),
        ("validation.json", '{"points": [3]}', "holds no list of points"),
        ("result.json", '{"tpot_ms": 3}', "holds no run"),
        ("results.parquet", "no parquet", "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, text: str, problem: str) -> None:
    (tmp_path / name).write_text(text)

    with pytest.raises(InputError, match=problem) as caught:
        read_folder(tmp_path)

    assert name in str(caught.value)


def test_a_broken_config_is_named(sweep: Path) -> None:
    (sweep / "sweep.yaml").write_text("a: [")

    with pytest.raises(InputError, match=r"sweep\.yaml: is no YAML"):
        read_folder(sweep)


def test_another_table_is_refused(tmp_path: Path) -> None:
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "results.parquet")

    with pytest.raises(InputError, match="no table of a sweep's results"):
        read_folder(tmp_path)


def test_a_folder_without_results_says_which_commands_write_some(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no results; name a folder that `moetier sweep`"):
        read_folder(tmp_path)
    with pytest.raises(InputError, match="is no folder"):
        read_folder(tmp_path / "nowhere")


def test_values_become_what_json_can_hold() -> None:
    assert plain(np.float64(1.5)) == 1.5
    assert plain(np.bool_(True)) is True
    assert plain(float("nan")) is None
    assert plain(np.float32("inf")) is None
    assert plain(pd.NA) is None
    assert plain(pd.NaT) is None
    assert plain({"mean": 0.5, "n": 3}) == 0.5
    assert plain({"n": 3}) is None
    assert plain(Path("a")) == "a"


def test_a_point_may_say_nothing_but_that_it_failed(sweep: Path) -> None:
    for name in ("results.parquet", "results.csv", "sweep.yaml", "provenance.json"):
        (sweep / name).unlink()
    shutil.rmtree(sweep / "points")
    (sweep / "points").mkdir()
    failed = {"key": "a", "status": "failed", "error": "out of room", "config": "broken"}
    (sweep / "points" / "a.json").write_text(json.dumps(failed))

    (entry,) = read_folder(sweep).entries

    assert (entry.done, entry.error) == (False, "out of room")
    assert entry.axes["hardware"] is None


def test_a_point_nested_too_deep_is_counted_as_lost(sweep: Path) -> None:
    next((sweep / "points").glob("*.json")).write_text("[" * 100_000 + "]" * 100_000)

    assert any("The files of 1 of 6 points" in note for note in read_folder(sweep).notes)


def test_a_validation_nested_too_deep_is_refused(validated: Path) -> None:
    (validated / "validation.json").write_text("[" * 100_000 + "]" * 100_000)

    with pytest.raises(InputError, match=r"validation.json: cannot be read"):
        read_folder(validated)


@pytest.mark.parametrize(("key", "value"), [("known_limitations", 3), ("warnings", "x")])
def test_remarks_that_are_no_list_are_refused(key: str, value: object, sweep: Path) -> None:
    (sweep / "provenance.json").write_text(json.dumps({key: value}))

    with pytest.raises(InputError, match=f"provenance.json: '{key}' is no list"):
        read_folder(sweep)
