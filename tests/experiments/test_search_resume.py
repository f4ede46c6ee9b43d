"""Tests that a search killed in the middle ends as if nothing had happened."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

FILES = ("results.csv", "front.csv", "recommended.yaml", "provenance.json", "search.yaml")

MAIN = "from moetier.experiments.cli import main; main()"

# The process kills itself, with the signal of `kill -9`, at moments that are hard to survive.
KILL = """
import os, signal
def after(owner, name, times):
    call, left = getattr(owner, name), [times]
    def counted(*args, **more):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **more)
    setattr(owner, name, counted)
"""
KILLED = {
    "while-drawing": "import optuna; after(optuna.trial.Trial, 'suggest_int', 13)",
    "while-running": "from moetier.experiments import perform; after(perform, 'run_point', 7)",
    "while-telling": "import optuna; after(optuna.study.Study, 'tell', 8)",
    "before-the-end": "from moetier.experiments import search; after(search, '_gather', 1)",
}


def search(config: Path, out: Path, *more: str, before: str = "") -> tuple[int, str]:
    """Run a search in a process of its own; return its status and what it printed."""
    log = out.parent / f"{out.name}.log"
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, "-c", before + MAIN, "search", str(config), "--out", str(out), *more],
            stdout=file,
            stderr=file,
            check=False,
            timeout=120,
        )
    return done.returncode, log.read_text()


def contents(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text().replace(str(folder), "DIR") for name in FILES}


@pytest.mark.slow
@pytest.mark.parametrize("moment", KILLED)
def test_killed_and_run_again_gives_the_same(
    moment: str, run_keys: dict[str, Any], write_yaml: Callable[..., Path], tmp_path: Path
) -> None:
    config = write_yaml(
        {
            "name": "small",
            "base": run_keys,
            "space": {
                "eviction": ["lru", "layer-lfu", "slice-aware"],
                "prefetch": ["none", {"kind": "previous-token", "depth": [1, 2]}],
                "capacity.dram": {"low": "10 %", "high": "50 %", "step": "10 %"},
            },
            "objectives": ["tpot_ms", "capacity.dram"],
            "trials": 15,
            "batch": 5,
        }
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert search(config, whole)[0] == 0

    killed, _ = search(config, broken, before=f"{KILL}{KILLED[moment]}\n")
    half = not (broken / "results.csv").exists() and (broken / "journal.log").exists()
    status, text = search(config, broken)

    assert killed == -signal.SIGKILL
    assert half
    assert status == 0, text
    assert contents(broken) == contents(whole)
