"""Tests of keeping results on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from moetier.experiments.store import (
    Store,
    dump_json,
    new_folder,
    versions,
    write_run,
    write_text,
    write_yaml,
)
from moetier.traces.errors import InputError
from moetier.traces.files import replacing

DEAD = 2**22 + 1  # above the largest process id that Linux gives


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (float("nan"), "null"),
        (float("inf"), "null"),
        (None, "null"),
        (0.1, "0.1"),
        ({"a": (1, float("nan"))}, '{"a": [1, null]}'),
        ({1: True}, '{"1": true}'),
    ],
)
def test_json_has_null_for_what_is_not_a_number(value: Any, text: str) -> None:
    assert json.loads(dump_json(value)) == json.loads(text)


def test_a_point_comes_back_as_it_was_put(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.create()
    store.put("k", {"key": "k", "status": "done", "x": 0.1})

    assert store.point("k") == {"key": "k", "status": "done", "x": 0.1}
    assert store.point("other") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": "other"}', "\xff"])
def test_a_point_that_cannot_be_trusted_is_none(text: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.create()
    (tmp_path / "points" / "k.json").write_text(text, encoding="latin-1")

    assert store.point("k") is None


def test_results_come_as_parquet_and_csv(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.gather([{"a": "x", "b": 1, "c": None}, {"a": "y", "b": 0.5, "c": None}])

    table = store.results()

    assert table["b"].tolist() == [1.0, 0.5]
    assert (tmp_path / "results.csv").read_text() == "a,b,c\nx,1.0,\ny,0.5,\n"


def test_a_column_of_text_and_numbers_becomes_text(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.gather([{"a": "x", "b": 1}, {"a": 2, "b": None}])

    assert store.results()["a"].tolist() == ["x", "2"]


def test_missing_results_are_an_error_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no results\.parquet; run `moetier sweep` first"):
        Store(tmp_path).results()


def test_results_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"a": "x", "b": 0.1}, {"a": "y", "b": None}]
    made = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        Store(tmp_path / name).gather(rows)
        made.append((tmp_path / name / "results.parquet").read_bytes())

    assert made[0] == made[1]


def test_files_of_dead_processes_are_swept_up(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.create()
    with replacing(tmp_path / "points" / "k.json") as alive:
        alive.touch()
        dead = alive.with_name(alive.name.replace(f".{os.getpid()}.", f".{DEAD}."))
        elsewhere = alive.with_name(f".k.json.another-machine.{DEAD}.tmp")
        other = alive.with_name(".notes.tmp")
        for path in (dead, elsewhere, other):
            path.touch()

        store.create()

        assert not dead.exists()
        assert all(path.exists() for path in (alive, elsewhere, other))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(InputError, match=r"file: cannot be made: .*; use another --out"):
        Store(tmp_path / "file").create()


def test_a_run_is_kept_with_its_config(tmp_path: Path) -> None:
    write_run(tmp_path, {"tpot_ms": 1.5, "config": {"seed": 3}})

    assert json.loads((tmp_path / "result.json").read_text())["tpot_ms"] == 1.5
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"seed": 3}


def test_yaml_keeps_the_order_and_the_letters(tmp_path: Path) -> None:
    write_yaml(tmp_path / "x.yaml", {"b": 1, "a": "µ"})

    assert (tmp_path / "x.yaml").read_text(encoding="utf-8") == "b: 1\na: µ\n"


def test_a_text_replaces_another_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("a long text")
    write_text(path, "short")

    assert path.read_text() == "short"
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_folder_goes_when_an_error_leaves_it_empty(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"

    with pytest.raises(KeyError), new_folder(folder):
        raise KeyError

    assert not folder.exists()


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_with_something_in_it_stays(there: bool, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    if there:
        folder.mkdir()
    with new_folder(folder) as made:
        (made / "x").touch()

    assert (folder / "x").exists()


def test_a_new_folder_on_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(InputError, match="cannot be made"), new_folder(tmp_path / "file"):
        pass


def test_versions_name_what_computes() -> None:
    found = versions()

    assert {"moetier", "python", "numpy", "pyarrow"} <= set(found)
    assert found["pandas"] == pd.__version__


def test_a_library_that_is_not_there_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from moetier.experiments import store

    monkeypatch.setattr(store, "_LIBRARIES", ("no-such-library",))

    assert set(versions()) == {"moetier", "python"}
