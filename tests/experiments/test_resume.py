"""Tests that a sweep killed in the middle ends as if nothing had happened."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RESULTS = ("results.csv", "results.parquet", "provenance.json", "sweep.yaml")

MAIN = "from moetier.experiments.cli import main; main()"

# The process kills itself, with the signal of `kill -9`, at the moment that is hardest to survive.
KILL_WHILE_WRITING = """
import os, pathlib, signal
replace, left = pathlib.Path.replace, [5]
def kill(self, target):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(self, target)
pathlib.Path.replace = kill
"""
KILL_BETWEEN_POINTS = """
import os, signal
from moetier.experiments import sweep
perform = sweep.perform
def some(*args):
    for at, _ in enumerate(perform(*args)):
        if at == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        yield
sweep.perform = some
"""


def sweep(config: Path, out: Path, *more: str, before: str = "") -> tuple[int, str]:
    """Run a sweep in a process of its own; return its status and what it printed."""
    log = out.parent / f"{out.name}.log"
    with log.open("w") as file:  # not a pipe, which worker processes would keep open
        done = subprocess.run(
            [sys.executable, "-c", before + MAIN, "sweep", str(config), "--out", str(out), *more],
            stdout=file,
            stderr=file,
            check=False,
            timeout=120,
        )
    return done.returncode, log.read_text()


@pytest.fixture
def config(sweep_keys: dict[str, Any], write_yaml: Callable[..., Path]) -> Path:
    """A sweep of twelve points, with records."""
    sweep_keys["base"]["synthetic"]["tokens"] = 100
    sweep_keys["sweep"]["capacity.dram"] = ["20 %", "30 %", "40 %", "50 %"]
    sweep_keys["records"] = True
    return write_yaml(sweep_keys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kill", "jobs"),
    [(KILL_WHILE_WRITING, "1"), (KILL_BETWEEN_POINTS, "1"), (KILL_BETWEEN_POINTS, "2")],
    ids=["while-writing", "between-points", "two-processes"],
)
def test_killed_in_the_middle_and_run_again_gives_the_same(
    kill: str, jobs: str, config: Path, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert sweep(config, whole)[0] == 0

    killed, _ = sweep(config, broken, "--jobs", jobs, before=kill)
    before = {path.name for path in broken.glob("points/*.json")}
    half = list(broken.glob("*/.*.tmp"))
    status, text = sweep(config, broken)

    assert killed == -signal.SIGKILL
    assert 2 <= len(before) < 12
    assert half or kill is not KILL_WHILE_WRITING
    assert status == 0, text
    assert "12 of 12 points done" in text
    assert "of them from before" in text
    for name in RESULTS:
        assert (broken / name).read_bytes() == (whole / name).read_bytes()
    for path in whole.glob("*/*"):
        assert (broken / path.relative_to(whole)).read_bytes() == path.read_bytes()
    assert not list(broken.glob("**/.*.tmp"))


@pytest.mark.slow
def test_two_sweeps_into_one_folder_do_not_harm_each_other(config: Path, tmp_path: Path) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    assert sweep(config, alone)[0] == 0
    command = [sys.executable, "-c", MAIN, "sweep", str(config), "--out", str(shared)]

    with (
        subprocess.Popen(command, stdout=subprocess.DEVNULL) as first,
        subprocess.Popen(command, stdout=subprocess.DEVNULL) as second,
    ):
        assert (first.wait(120), second.wait(120)) == (0, 0)

    assert (shared / "results.csv").read_bytes() == (alone / "results.csv").read_bytes()
