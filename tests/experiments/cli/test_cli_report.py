"""Tests of `moetier report`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly", reason="needs the extra 'report'")

Invoke = Callable[..., Any]
WriteYaml = Callable[..., Path]


@pytest.fixture
def folder(
    moetier: Invoke, write_yaml: WriteYaml, sweep_keys: dict[str, Any], tmp_path: Path
) -> Path:
    moetier("sweep", write_yaml(sweep_keys), "--out", tmp_path / "o")
    return tmp_path / "o"


@pytest.mark.slow
def test_a_report_of_a_sweep(moetier: Invoke, folder: Path) -> None:
    lines = moetier("report", folder).stdout.splitlines()

    assert lines[-1] == str(folder / "report.html")
    assert str(folder / "figures" / "pareto.pdf") in lines
    assert all(Path(line).is_file() for line in lines)


def test_elsewhere_and_without_figures(moetier: Invoke, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"

    result = moetier("report", folder, "--out", out, "--no-static", "--timelines", 0)

    assert result.stdout == f"{out}\n"
    assert not (folder / "figures").exists()
    assert 'id="timeline-1"' not in out.read_text()


def test_as_many_timelines_as_asked_for(moetier: Invoke, folder: Path) -> None:
    moetier("report", folder, "--no-static", "--timelines", 2)

    text = (folder / "report.html").read_text()
    assert 'id="timeline-2"' in text
    assert 'id="timeline-3"' not in text


def test_the_timeline_of_a_point_by_its_key(moetier: Invoke, folder: Path) -> None:
    key = next((folder / "points").glob("*.json")).stem

    moetier("report", folder, "--no-static", "--timelines", 0, "--timeline-of", key[:8])
    result = moetier("report", folder, "--timeline-of", "zz", status=2)

    assert 'id="timeline-1"' in (folder / "report.html").read_text()
    assert result.stderr.startswith("error: --timeline-of: no point")


@pytest.mark.slow
def test_a_search_shows_what_it_recommends(
    moetier: Invoke, write_yaml: WriteYaml, run_keys: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("optuna", reason="needs the extra 'search'")
    keys = {
        "name": "s",
        "base": run_keys,
        "space": {"eviction": ["lru", "lfu"], "capacity.dram": {"low": "10 %", "high": "50 %"}},
        "objectives": ["tpot_ms", "capacity.dram"],
        "trials": 8,
        "batch": 4,
    }
    moetier("search", write_yaml(keys), "--out", tmp_path / "s")

    moetier("report", tmp_path / "s", "--no-static")

    text = (tmp_path / "s" / "report.html").read_text()
    assert 'id="recommended"' in text
    assert "nearest to the best of each" in text
    assert '"recommended":null' not in text


def test_a_run_with_headroom(
    moetier: Invoke, write_yaml: WriteYaml, run_keys: dict[str, Any], tmp_path: Path
) -> None:
    moetier("simulate", write_yaml(run_keys), "--headroom", "--out", tmp_path / "r")

    moetier("report", tmp_path / "r")

    assert 'id="headroom"' in (tmp_path / "r" / "report.html").read_text()


@pytest.mark.parametrize("made", [True, False])
def test_another_folder_is_refused(moetier: Invoke, tmp_path: Path, made: bool) -> None:
    folder = tmp_path / "nothing"
    if made:
        folder.mkdir()

    result = moetier("report", folder, status=2)

    expected = "holds no results" if made else "is no folder"
    assert result.stderr.startswith(f"error: {folder}: {expected}; name a folder")
