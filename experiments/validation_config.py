"""This module is the schema of a validation: which runs to hold against real ones, and where."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moetier.experiments.config import read_mapping
from moetier.experiments.verdict import Tolerances
from moetier.sim.yaml_input import check

RAW = "raw"
"""As a pace: as fast as the disk can."""


class ValidateConfig(BaseModel):
    """A grid of *policies* and capacities on a real machine, of which *base* is a run's config."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # of the folder under out/
    base: dict[str, Any]  # a run without policy and capacity
    policies: list[str | dict[str, Any]] = Field(min_length=1)  # to compare
    capacity: dict[str, list[str]] = Field(min_length=1, max_length=1)  # one tier: its capacities
    machine: Literal["disk", "cuda"] = "disk"  # that performs the runs
    lanes: int = Field(default=2, ge=1)  # threads that read, or streams that copy
    pace: str = RAW  # of each lane, such as "100 MB/s"
    latency: str = "0 ns"  # of each transfer that is held to the pace
    threads: int = Field(default=1, ge=1, le=256)  # that compute
    folder: str | None = None  # where the expert file lies; default: a temporary one
    calibrate_seconds: float = Field(default=60, gt=0)  # if the hardware is `calibrate`
    repeats: int = Field(default=3, ge=1)  # of each point, interleaved
    seed: int = 0  # of weights and random parts
    tolerances: Tolerances = Tolerances()  # that decide the exit status


def load_validation(path: str | Path, overrides: list[str] | None = None) -> ValidateConfig:
    """Return the validation that the YAML file *path* describes."""
    return check(ValidateConfig, read_mapping(path, overrides), str(path))
