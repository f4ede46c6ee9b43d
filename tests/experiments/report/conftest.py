"""Folders of results for the tests of reports, each made once, and copied by who changes them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from moetier.experiments.config import load_run
from moetier.experiments.report.folder import Entry
from moetier.experiments.runs import run
from moetier.experiments.store import write_run
from moetier.experiments.sweep import SweepConfig, points_of, run_sweep

RUN = {
    "synthetic": {"geometry": "moe-tiny", "prompt": 4, "tokens": 12, "reuse": 0.5},
    "hardware": "phone-ufs4",
    "capacity": {"dram": "25 %"},
}

SWEEP = {
    "name": "small",
    "base": RUN,
    "sweep": {
        "policy": ["on-demand", {"eviction": "layer-lfu"}, {"eviction": "belady"}],
        "capacity.dram": ["25 %", "50 %"],
    },
}

HOSTILE = '</script><img src=x onerror=alert(1)> & "q" \''
"""A name that would break out of wherever it is not escaped."""


def point_of(policy: str, simulated: float, repeats: list[float], size: str) -> dict[str, Any]:
    """Return a point as validation.json has it."""
    return {
        "policy": policy,
        "capacity": {"dram": size},
        "asks_lateness": False,
        "decision_log_equal": True,
        "bytes_equal": True,
        "first_difference": None,
        "miss_rate": 0.5,
        "bytes_read_total": 1,
        "tpot_sim_ms": simulated,
        "tpot_measured_ms": repeats,
        "stall_share_sim": 0.5,
        "stall_share_measured": [0.4 for _ in repeats],
        "attribution_ms": None,
        "error": 0.1,
        "spread": 0.02,
    }


VALIDATION = {
    "name": "on disk",
    "points": [
        point_of("LRU", 11.0, [10.0, 9.0, 10.5], "8 %"),
        point_of("LRU", 6.0, [5.0, 5.5, 5.2], "16 %"),
        point_of(HOSTILE, 4.0, [4.2, 4.1, 4.0], "8 %"),
    ],
    "median_error": 0.1,
    "p90_error": 0.15,
    "median_error_beyond_spread": 0.05,
    "p90_error_beyond_spread": 0.08,
    "kendall_tau": None,
    "equal": True,
    "missed": ["p90_error is 15.0%, above 10.0%"],
    "would_notice": {"bandwidth doubled": True, "contention off": False},
    "load": {"others_share": 0.25, "cores": 2},
    "hardware": "this-disk",
    "identity": {"cpu": "a processor"},
    "known_limitations": [f"{n} of 340 transfers took longer" for n in (1, 5)],
}


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep that is done; not to be changed."""
    folder = tmp_path_factory.mktemp("sweep") / "small"
    config = SweepConfig.model_validate(SWEEP)
    run_sweep(config, points_of(config, "test"), folder)
    return folder


@pytest.fixture
def sweep(finished: Path, tmp_path: Path) -> Path:
    """The same sweep, to be changed."""
    return Path(shutil.copytree(finished, tmp_path / "small"))


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A sweep whose names try to break out of the page."""
    config = SweepConfig.model_validate({
        "name": "hostile",
        "base": RUN,
        "sweep": {
            "policy": [
                {"name": HOSTILE, "eviction": "lru"},
                {"name": "<b>b</b>", "eviction": "lfu"},
            ],
            "capacity.dram": ["25 %", "50 %"],
        },
    })  # fmt: skip
    folder = tmp_path / "hostile"
    run_sweep(config, points_of(config, "test"), folder)
    return folder


@pytest.fixture
def one_run(tmp_path: Path) -> Path:
    """A folder as `moetier simulate --headroom --out` writes it."""
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(RUN))
    folder = tmp_path / "one"
    folder.mkdir()
    bound = {
        "tpot_ms": 1.0, "miss_rate": 0.1, "byte_miss_rate": 0.1, "stall_share": 0.1,
        "tpot_gain": 0.25, "reason": None,
    }  # fmt: skip
    left = {
        "own": bound,
        "belady": bound | {"optimal": True},
        "perfect_prefetch": bound | {"depth": 2},
        "roofline": {"tpot_ms": 1.0, "compute_ms": 1.0, "link_ms": 0.5, "bound": "compute"},
    }
    write_run(folder, run(load_run(config)) | {"headroom": left})
    return folder


@pytest.fixture
def validated(tmp_path: Path) -> Path:
    """A folder as `moetier validate` writes it."""
    folder = tmp_path / "validated"
    folder.mkdir()
    (folder / "validation.json").write_text(json.dumps(VALIDATION))
    (folder / "profile.yaml").write_text(
        yaml.safe_dump({"name": "this-disk", "tiers": {"dram": {"source": "measured here"}}})
    )
    return folder


@pytest.fixture
def make_entry() -> Callable[..., Entry]:
    """Return a function that makes a point with some metrics."""

    def make(key: str = "k", policy: str = "lru", **given: Any) -> Entry:
        axes = {"policy": policy, "hardware": "h", "source": "s", **given.pop("axes", {})}
        outcome = given.pop("outcome", {})
        return Entry(key, given.pop("status", "done"), None, axes, given, outcome)

    return make
