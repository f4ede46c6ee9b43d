"""Tests that every YAML in experiments/ loads, and runs when made small."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from moetier.experiments.config import SWEEP_KEYS, load_run
from moetier.experiments.files import find_file
from moetier.experiments.papers import load_paper
from moetier.experiments.runs import run
from moetier.experiments.search import run_search
from moetier.experiments.search_config import load_search
from moetier.experiments.studies.locality import localities
from moetier.experiments.sweep import check_plots, load_sweep, points_of, run_sweep
from moetier.experiments.validation_config import load_validation
from moetier.traces.errors import InputError

ROOT = Path(str(files("moetier.experiments")))
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.yaml"))
SAMPLE = "traces/samples/moe-tiny.parquet"


def sample_is_there() -> bool:
    try:
        find_file(SAMPLE)
    except InputError:
        return False
    return True


def test_there_are_examples() -> None:
    assert "configs/quickstart.yaml" in FILES
    assert len(FILES) >= 5


@pytest.mark.parametrize("name", ["quickstart", "main-figure"])
def test_the_first_figure_is_accuracy_against_misses(name: str) -> None:
    config = load_sweep(ROOT / f"configs/{name}.yaml", [])

    assert config.base["live"] == "moe-tiny"
    plot = config.plots[0]
    assert (plot.kind, plot.x, plot.y) == ("pareto", "byte_miss_rate", "accuracy")


@pytest.mark.parametrize("name", FILES)
def test_every_yaml_loads_and_runs(name: str, tmp_path: Path) -> None:
    path = ROOT / name
    data: dict[str, Any] = yaml.safe_load(path.read_text())
    if name.startswith("papers/"):
        assert load_paper(path.stem).figures
        return
    if name.startswith("studies/"):
        assert localities()
        return
    if "policies" in data:  # of a comparison with real runs, which has tests of its own
        assert load_validation(path).policies
        return
    if "live" in data.get("base", data):
        pytest.importorskip("transformers")
    if data.get("base", data).get("trace") and not sample_is_there():
        pytest.skip(f"{SAMPLE} is not there yet")
    base = data.get("base", data)
    small = [] if "trace" in base else ["synthetic.tokens=2", "synthetic.prompt=2"]
    if "live" in base:
        small = ["base.evaluate.items=2"]
    if "objectives" in data:
        pytest.importorskip("optuna")
        found = run_search(load_search(path, [*small, "trials=2"]), tmp_path)
        assert found.trials["all"] == 2
        return
    if not any(key in data for key in SWEEP_KEYS):
        assert run(load_run(path, small))["tokens"] == 2
        return
    config = load_sweep(path, small)
    points = points_of(config, name)
    check_plots(config, points, name)

    outcome = run_sweep(config, points[:1] + points[-1:], tmp_path)

    assert outcome.failed == []
