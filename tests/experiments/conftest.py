"""Fixtures of the experiment tests: small configs, and files that hold them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from moetier.experiments.config import RunConfig, check_run
from moetier.experiments.overrides import set_key

WriteYaml = Callable[..., Path]


@pytest.fixture
def run_keys() -> dict[str, Any]:
    """A run that takes a few milliseconds."""
    return {
        "synthetic": {"geometry": "moe-tiny", "prompt": 4, "tokens": 12, "reuse": 0.5},
        "hardware": "phone-ufs4",
        "capacity": {"dram": "25 %"},
    }


@pytest.fixture
def sweep_keys(run_keys: dict[str, Any]) -> dict[str, Any]:
    """A sweep of six such runs."""
    return {
        "name": "small",
        "base": run_keys,
        "sweep": {
            "policy": ["on-demand", {"eviction": "layer-lfu"}, {"eviction": "belady"}],
            "capacity.dram": ["25 %", "50 %"],
        },
    }


@pytest.fixture
def write_yaml(tmp_path: Path) -> WriteYaml:
    """Return a function that writes a mapping to a YAML file, with dotted keys changed."""

    def write(data: dict[str, Any], name: str = "config.yaml", **changes: Any) -> Path:
        for key, value in changes.items():
            set_key(data, key.replace("__", "."), value)
        path = tmp_path / name
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        return path

    return write


@pytest.fixture
def make_run(run_keys: dict[str, Any]) -> Callable[..., RunConfig]:
    """Return a function that makes a checked run, with dotted keys changed."""

    def make(**changes: Any) -> RunConfig:
        for key, value in changes.items():
            set_key(run_keys, key.replace("__", "."), value)
        return check_run(run_keys, "test")

    return make
