"""Tests of `moetier sweep` and `moetier plot`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from moetier.experiments.cli.sweep import spell_s

Invoke = Callable[..., Any]
WriteYaml = Callable[..., Path]

PLOTS = [{"kind": "pareto", "x": "byte_miss_rate", "y": "tpot_ms", "hue": "policy"}]


@pytest.fixture
def config(write_yaml: WriteYaml, sweep_keys: dict[str, Any]) -> Path:
    return write_yaml(sweep_keys)


def test_a_sweep_goes_to_out_name_by_default(
    moetier: Invoke, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    result = moetier("sweep", config)

    assert result.stdout.startswith("6 of 6 points done: out/small")
    assert len(pd.read_csv(tmp_path / "out/small/results.csv")) == 6


def test_a_second_time_everything_is_there(moetier: Invoke, config: Path, tmp_path: Path) -> None:
    moetier("sweep", config, "--out", tmp_path / "o")

    result = moetier("sweep", config, "--out", tmp_path / "o")

    assert "6 of 6 points done, 6 of them from before" in result.stdout


def test_a_dry_run_counts_and_estimates_and_writes_nothing(
    moetier: Invoke, config: Path, tmp_path: Path
) -> None:
    out = tmp_path / "o"

    result = moetier("sweep", config, "--dry-run", "--out", out)

    assert "6 points, 0 of them done" in result.stdout
    assert "estimated time: under 1 s" in result.stdout
    assert not out.exists()


def test_a_dry_run_knows_what_is_done(moetier: Invoke, config: Path, tmp_path: Path) -> None:
    moetier("sweep", config, "--out", tmp_path / "o")

    result = moetier("sweep", config, "--dry-run", "--out", tmp_path / "o")

    assert "6 points, 6 of them done" in result.stdout
    assert "estimated" not in result.stdout


def test_a_failed_point_is_status_1_and_a_row(
    moetier: Invoke, config: Path, tmp_path: Path
) -> None:
    words = ("--set", "sweep={capacity.dram: [1 KiB, 50 %]}", "--out", tmp_path / "o")
    result = moetier("sweep", config, *words, status=1)

    assert "1 of 2 points done" in result.stdout
    assert "failed: capacity.dram=1 KiB: capacity.dram: 1 KiB cannot hold" in result.stdout
    assert pd.read_csv(tmp_path / "o/results.csv")["status"].tolist() == ["failed", "done"]


def test_an_estimate_of_points_that_fail_is_unknown(moetier: Invoke, config: Path) -> None:
    result = moetier("sweep", config, "--set", "sweep={capacity.dram: [1 KiB]}", "--dry-run")

    assert "estimated time: unknown: the points tried failed" in result.stdout


def test_warnings_of_the_sweep_are_shown(moetier: Invoke, config: Path, tmp_path: Path) -> None:
    words = ("--set", "sweep={policy: [on-demand, previous-token], capacity.dram: [100 %]}")

    result = moetier("sweep", config, *words, "--out", tmp_path / "o")

    assert "warning: policy inert: on-demand and previous-token gave identical" in result.stdout


def test_a_sweep_with_plots_draws_them(
    moetier: Invoke, write_yaml: WriteYaml, sweep_keys: dict[str, Any], tmp_path: Path
) -> None:
    path = write_yaml({**sweep_keys, "plots": PLOTS})

    result = moetier("sweep", path, "--out", tmp_path / "o")

    assert result.stdout.splitlines()[-1] == str(tmp_path / "o" / "pareto.png")
    assert (tmp_path / "o" / "pareto.csv").is_file()


def test_a_figure_that_cannot_be_drawn_fails_nothing(
    moetier: Invoke, write_yaml: WriteYaml, sweep_keys: dict[str, Any], tmp_path: Path
) -> None:
    plots = [{"kind": "pareto", "x": "accuracy", "y": "tpot_ms"}, *PLOTS]

    result = moetier("sweep", write_yaml({**sweep_keys, "plots": plots}), "--out", tmp_path / "o")

    assert "not drawn: plots.0: x: 'accuracy' is null in every row" in result.stderr
    assert (tmp_path / "o" / "pareto-2.png").is_file()  # the next one is drawn all the same


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--jobs", "0"), "--jobs: 0 processes; 1 or more, or -1"),
        (("--jobs", "-2"), "--jobs: -2 processes"),
        (("--backend", "spark"), "Invalid value for '--backend'"),
        (("--set", "plots=[{kind: line, x: nope, y: tpot_ms}]"), "plots.0.x: no metric or config"),
        (("--set", "sweep.seed=3"), "sweep.seed: expected a list of values, got 3"),
        (("--set", "sweep.polcy=[x]"), "polcy: unknown key; did you mean 'policy'?"),
        (("--set", "hardware=nope"), "hardware: unknown hardware 'nope'"),
    ],
)
def test_bad_input_is_status_2_and_no_folder(
    words: tuple[str, ...], problem: str, moetier: Invoke, config: Path, tmp_path: Path
) -> None:
    out = tmp_path / "o"

    result = moetier("sweep", config, "--out", out, *words, status=2)

    assert problem in result.stderr
    assert not out.exists()


@pytest.mark.parametrize("backend", ["dask", "ray"])
def test_a_backend_that_is_missing_is_status_2(
    backend: str, moetier: Invoke, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    result = moetier("sweep", config, "--backend", backend, status=2)

    assert f"backend '{backend}' needs the package" in result.stderr


def test_a_run_is_sent_to_simulate(
    moetier: Invoke, write_yaml: WriteYaml, run_keys: dict[str, Any]
) -> None:
    assert "use `moetier simulate`" in moetier("sweep", write_yaml(run_keys), status=2).stderr


def test_a_folder_is_drawn_again(
    moetier: Invoke, write_yaml: WriteYaml, sweep_keys: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "o"
    moetier("sweep", write_yaml({**sweep_keys, "plots": PLOTS}), "--out", out)
    first = (out / "pareto.png").read_bytes()
    (out / "pareto.png").unlink()

    result = moetier("plot", out)

    assert result.stdout.splitlines() == [str(out / "pareto.png")]
    assert (out / "pareto.png").read_bytes() == first


def test_a_config_draws_its_own_plots(
    moetier: Invoke, write_yaml: WriteYaml, sweep_keys: dict[str, Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    moetier("sweep", write_yaml(sweep_keys))
    line = [{"kind": "line", "x": "capacity.dram", "y": "tpot_ms", "hue": "policy"}]
    path = write_yaml({**sweep_keys, "plots": line})

    assert moetier("plot", path).stdout.splitlines() == ["out/small/line.png"]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        ("nothing", "no such file"),
        ("no plots", "names no plots; add `plots:`"),
        ("no results", "has no results.parquet; run `moetier sweep` first"),
        ("empty folder", "sweep.yaml"),
    ],
)
def test_what_cannot_be_plotted_is_status_2(
    make: str, problem: str, moetier: Invoke, config: Path, tmp_path: Path
) -> None:
    where = {"nothing": tmp_path / "gone", "no plots": tmp_path / "o"}.get(make, config)
    if make == "no plots":
        moetier("sweep", config, "--out", tmp_path / "o")
    if make == "empty folder":
        where = tmp_path / "empty"
        where.mkdir()

    assert problem in moetier("plot", where, status=2).stderr


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "under 1 s"),
        (1, "1 s"),
        (89, "89 s"),
        (120, "2 min"),
        (5399, "90 min"),
        (7200, "2.0 h"),
    ],
)
def test_times_are_spelled_for_people(seconds: float, text: str) -> None:
    assert spell_s(seconds) == text
