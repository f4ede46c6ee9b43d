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
from moetier.experiments.sweep import check_plots, load_sweep, points_of, run_sweep
from moetier.traces.errors import InputError

ROOT = Path(str(files("moetier.experiments")))
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.yaml"))
SAMPLE = "traces/samples/moe-tiny.parquet"

QUICKSTART = {
    "name": "quickstart",
    "base": {"trace": SAMPLE, "hardware": "phone-ufs4"},
    "sweep": {
        "policy": ["on-demand", {"eviction": "layer-lfu"}, {"eviction": "belady"}],
        "capacity.dram": ["15 %", "25 %", "50 %", "75 %"],
    },
    "plots": [
        {"kind": "pareto", "x": "byte_miss_rate", "y": "energy_mj_per_token", "hue": "policy"},
        {"kind": "pareto", "x": "capacity.dram", "y": "tpot_ms", "hue": "policy"},
    ],
}


def sample_is_there() -> bool:
    try:
        find_file(SAMPLE)
    except InputError:
        return False
    return True


def test_there_are_examples() -> None:
    assert "configs/quickstart.yaml" in FILES
    assert len(FILES) >= 5


def test_the_quickstart_is_that_of_the_readme() -> None:
    assert yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text()) == QUICKSTART


@pytest.mark.parametrize("name", FILES)
def test_every_yaml_loads_and_runs(name: str, tmp_path: Path) -> None:
    path = ROOT / name
    data: dict[str, Any] = yaml.safe_load(path.read_text())
    if name.startswith("papers/"):
        assert load_paper(path.stem).figures
        return
    if data.get("base", data).get("trace") and not sample_is_there():
        pytest.skip(f"{SAMPLE} is not there yet")
    small = (
        [] if "trace" in data.get("base", data) else ["synthetic.tokens=2", "synthetic.prompt=2"]
    )
    if not any(key in data for key in SWEEP_KEYS):
        assert run(load_run(path, small))["tokens"] == 2
        return
    config = load_sweep(path, small)
    points = points_of(config, name)
    check_plots(config, points, name)

    outcome = run_sweep(config, points[:1] + points[-1:], tmp_path)

    assert outcome.failed == []
