"""Tests of sweeps on a real Dask cluster: a scheduler and two workers, processes of their own."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moetier.experiments.points import Point
from moetier.experiments.sweep import SweepConfig, points_of, run_sweep

distributed = pytest.importorskip("distributed", reason="needs the package 'distributed'")
dask = pytest.importorskip("dask", reason="needs the package 'dask'")

CONFIG = SweepConfig(
    name="cluster",
    base={"synthetic": {"geometry": "olmoe-1b-7b", "tokens": 40}, "hardware": "rtx-4090"},
    sweep={
        "policy": ["on-demand", {"eviction": "lfu"}, {"eviction": "belady"}],
        "capacity.hbm": ["10 %", "20 %", "30 %", "40 %"],
    },
)
FILES = ("results.csv", "results.parquet", "provenance.json")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def points() -> list[Point]:
    return points_of(CONFIG, "cluster")


@pytest.fixture
def cluster() -> Iterator[Any]:
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as made,
        dask.config.set(scheduler_address=made.scheduler_address),
    ):
        yield made


def contents(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in FILES]


def test_a_cluster_gives_the_bytes_of_one_process(
    cluster: Any, points: list[Point], tmp_path: Path
) -> None:
    alone = run_sweep(CONFIG, points, tmp_path / "alone")
    together = run_sweep(CONFIG, points, tmp_path / "cluster", jobs=2, backend="dask")

    assert alone.failed == together.failed == []
    assert contents(tmp_path / "cluster") == contents(tmp_path / "alone")


def test_a_worker_that_is_killed_loses_nothing(
    cluster: Any, points: list[Point], tmp_path: Path
) -> None:
    folder = tmp_path / "cluster"
    pids = [worker.process.pid for worker in cluster.workers.values()]

    def kill() -> None:
        while len(list(folder.glob("points/*.json"))) < 2:
            time.sleep(0.01)
        os.kill(pids[0], signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    found = run_sweep(CONFIG, points, folder, jobs=2, backend="dask")
    thread.join()

    assert found.failed == []
    assert len(found.rows) == len(points)
    run_sweep(CONFIG, points, tmp_path / "alone")
    assert contents(folder) == contents(tmp_path / "alone")
