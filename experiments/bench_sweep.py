"""This module measures sweeps: what a point costs beside its run, and what a second process gains.

The points of the first row are so small that scheduling, storing and gathering are most of their
cost; those of the second take long enough for the work to count.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from moetier.experiments.points import Point
from moetier.experiments.sweep import SweepConfig, points_of, run_sweep

SMALL_POINTS = 10_000
LARGE_POINTS, LARGE_TOKENS = 60, 400


def small(points: int) -> SweepConfig:
    """Return a sweep of *points* runs of four tokens through three small layers."""
    return SweepConfig(
        name="small",
        base={
            "synthetic": {"geometry": "moe-small", "prompt": 1, "tokens": 3},
            "hardware": "rtx-4090",
            "capacity": {"hbm": "30 %"},
        },
        sweep={"synthetic.seed": list(range(points))},
    )


def large(points: int, tokens: int) -> SweepConfig:
    """Return a sweep of *points* runs of *tokens* tokens each."""
    return SweepConfig(
        name="large",
        base={
            "synthetic": {"geometry": "olmoe-1b-7b", "prompt": 1, "tokens": tokens},
            "hardware": "rtx-4090",
            "capacity": {"hbm": "30 %"},
        },
        sweep={"synthetic.seed": list(range(points))},
    )


def overhead(points: int = SMALL_POINTS) -> dict[str, Any]:
    """Return what *points* small points cost, all included, in a process of its own.

    `ms_per_point` counts reading the sweep, scheduling, the runs themselves, storing and gathering;
    `growth_mb` is by how much the driver's memory grew while two processes ran the points.
    """
    code = f"from moetier.experiments.bench_sweep import small_sweep; small_sweep({points})"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    seconds, growth = (float(word) for word in done.stdout.split())
    return {"seconds": seconds, "ms_per_point": seconds / points * 1e3, "growth_mb": growth}


def small_sweep(points: int) -> None:
    """Run *points* small points in two processes; print seconds, and growth of memory in MB."""
    config, resident = small(points), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()

        def note(done: int, _: int) -> None:
            if (done >= points // 10 and not resident) or done == points:
                resident.append(_resident_mb())

        outcome = run_sweep(
            config, points_of(config, config.name), Path(folder), jobs=2, on_done=note
        )
        took = time.perf_counter() - begin
    if outcome.failed:
        raise RuntimeError(outcome.failed[0])
    sys.stdout.write(f"{took} {resident[-1] - resident[0]}\n")


def two_processes(
    repeats: int, points: int = LARGE_POINTS, tokens: int = LARGE_TOKENS
) -> tuple[list[float], list[float]]:
    """Return the seconds of the same sweep in two processes and in one, interleaved."""
    config = large(points, tokens)
    chosen = points_of(config, config.name)
    pairs = [(_timed(config, chosen, 2), _timed(config, chosen, 1)) for _ in range(repeats)]
    return [two for two, _ in pairs], [one for _, one in pairs]


def _timed(config: SweepConfig, points: list[Point], jobs: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        run_sweep(config, points, Path(folder), jobs=jobs)
        return time.perf_counter() - begin


def _resident_mb() -> float:
    """Return the memory that this process holds now, in MB; 0 where nothing says so."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0.0
    line = next(x for x in status.read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) * 1024 / 1e6
