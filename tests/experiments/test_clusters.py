"""Tests of sweeps in several processes: local ones, a Dask and a Ray cluster, and one that dies.

The clusters are real: a scheduler and two workers, processes of their own on this machine.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from moetier.experiments import perform
from moetier.experiments.perform import Backend
from moetier.experiments.points import Point
from moetier.experiments.search import run_search
from moetier.experiments.search_config import check_search
from moetier.experiments.sweep import Outcome, SweepConfig, points_of, run_sweep

CONFIG = SweepConfig(
    name="cluster",
    base={"synthetic": {"geometry": "olmoe-1b-7b", "tokens": 40}, "hardware": "rtx-4090"},
    sweep={
        "policy": ["on-demand", {"eviction": "lfu"}, {"eviction": "belady"}],
        "capacity.hbm": ["10 %", "20 %", "30 %", "40 %"],
    },
)
FILES = ("results.csv", "results.parquet", "provenance.json")

Workers = Callable[[], list[int]]
"""Return the process ids of the workers there are."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def points() -> list[Point]:
    return points_of(CONFIG, "cluster")


@pytest.fixture(scope="module")
def alone(points: list[Point], tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """What one process writes."""
    folder = tmp_path_factory.mktemp("alone")
    assert run_sweep(CONFIG, points, folder).failed == []
    return contents(folder)


def contents(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in FILES]


def children(pid: int) -> list[int]:
    """Return the processes that *pid* started, and those that they started."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *children(child)]
    return found


def named(word: str) -> list[int]:
    """Return the processes whose command line has *word* in it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if word.encode() in line:
            found.append(int(path.parent.name))
    return found


@pytest.fixture
def loky() -> Workers:
    """Processes of joblib's own."""
    return lambda: [pid for pid in named("LokyProcess") if pid in children(os.getpid())]


@pytest.fixture
def dask(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    distributed = pytest.importorskip("distributed", reason="needs the package 'distributed'")
    settings = pytest.importorskip("dask", reason="needs the package 'dask'").config
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as made,
        settings.set(scheduler_address=made.scheduler_address),
    ):
        yield lambda: [worker.process.pid for worker in made.workers.values()]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    if find_spec("ray") is None:
        pytest.skip("needs the package 'ray'")
    import ray

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # whatever token a home folder holds
    port = 20_000 + os.getpid() % 10_000
    command = [sys.executable, "-m", "ray.scripts.scripts"]
    start = (
        f"start --head --num-cpus=2 --port={port} --node-ip-address=127.0.0.1 "
        "--include-dashboard=false --disable-usage-stats --object-store-memory=80000000"
    )
    with Path(tempfile.gettempdir(), "moetier-ray.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # `ray stop` ends all that is there, another test's too
        subprocess.run([*command, *start.split()], check=True, capture_output=True, timeout=120)
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        try:
            yield lambda: named("ray::PoolActor")
        finally:
            ray.shutdown()
            subprocess.run([*command, "stop"], check=True, capture_output=True, timeout=120)


@pytest.fixture(params=["loky", "dask", "ray"])
def workers(request: pytest.FixtureRequest) -> tuple[Backend, Workers]:
    return request.param, request.getfixturevalue(request.param)


def killed_in_the_middle(
    points: list[Point], folder: Path, backend: Backend, workers: Workers
) -> Outcome:
    """Run the *points*, and kill a worker as soon as two of them are done."""
    killed = []

    def kill() -> None:
        while len(list(folder.glob("points/*.json"))) < 2:
            time.sleep(0.005)
        killed.append(workers()[0])
        os.kill(killed[0], signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    outcome = run_sweep(CONFIG, points, folder, jobs=2, backend=backend)
    thread.join()
    assert killed
    return outcome


@pytest.mark.filterwarnings("default")  # what the clusters say of themselves
def test_workers_give_the_bytes_of_one_process(
    workers: tuple[Backend, Workers], points: list[Point], alone: list[bytes], tmp_path: Path
) -> None:
    together = run_sweep(CONFIG, points, tmp_path, jobs=2, backend=workers[0])

    assert together.failed == []
    assert contents(tmp_path) == alone


@pytest.mark.filterwarnings("default")
def test_a_worker_that_is_killed_loses_nothing(
    workers: tuple[Backend, Workers], points: list[Point], alone: list[bytes], tmp_path: Path
) -> None:
    found = killed_in_the_middle(points, tmp_path, *workers)

    assert found.failed == []
    assert contents(tmp_path) == alone


@pytest.mark.filterwarnings("default")
def test_workers_run_the_same_search(
    workers: tuple[Backend, Workers], run_keys: dict[str, Any], tmp_path: Path
) -> None:
    search = check_search(
        {
            "name": "small",
            "base": run_keys,
            "space": {
                "eviction": ["lru", "layer-lfu"],
                "capacity.dram": {"low": "10 %", "high": "50 %", "step": "10 %"},
            },
            "objectives": ["tpot_ms", "capacity.dram"],
            "trials": 8,
            "batch": 4,
        },
        "s",
    )

    one = run_search(search, tmp_path / "one")
    two = run_search(search, tmp_path / "two", jobs=2, backend=workers[0])

    assert two.rows == one.rows
    for name in ("results.csv", "results.parquet", "front.csv", "provenance.json"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def test_workers_that_always_die_end_the_sweep_and_keep_what_is_done(
    points: list[Point], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed_out = []

    def dies(todo: list[Point], folder: Path, *_: Any) -> Iterator[None]:
        handed_out.append(len(todo))
        if len(handed_out) == 1:
            perform.run_point(todo[0], folder, False)
            yield
        raise RuntimeError("the worker is no more")

    monkeypatch.setattr(perform, "_hand_out", dies)
    heard: list[int] = []

    with pytest.raises(RuntimeError, match="no more"):
        run_sweep(CONFIG, points, tmp_path, jobs=2, on_done=lambda done, _: heard.append(done))

    assert handed_out == [12, *[11] * perform.TRIES]
    assert heard == [0, 1]
    assert len(list(tmp_path.glob("points/*.json"))) == 1


def test_workers_end_soon_after_a_driver_that_is_killed(tmp_path: Path) -> None:
    code = (
        "from moetier.experiments.bench_sweep import large; from pathlib import Path\n"
        "from moetier.experiments.sweep import points_of, run_sweep\n"
        "config = large(200, 200)\n"
        f"run_sweep(config, points_of(config, 'large'), Path({str(tmp_path)!r}), jobs=2)"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as driver:
        mine: list[int] = []
        while len(mine) < 2 or not list(tmp_path.glob("points/*.json")):
            assert driver.poll() is None
            time.sleep(0.05)
            mine = [pid for pid in named("LokyProcess") if pid in children(driver.pid)]
        driver.kill()

    deadline = time.monotonic() + 60
    while set(mine) & set(named("LokyProcess")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
