"""This module estimates how long a sweep takes, by timing the beginning of two of its points."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from statistics import fmean

from moetier.experiments.config import load_hardware
from moetier.experiments.points import Point
from moetier.experiments.runs import setting_of
from moetier.experiments.sources import open_source
from moetier.sim.memory import extent_of
from moetier.sim.run import TraceSource, simulate
from moetier.traces.batch import LayerBatch
from moetier.traces.batching import batches_of
from moetier.traces.columns import Columns
from moetier.traces.errors import InputError

FIRST_STEPS = 16
ENOUGH_S = 0.5
PROCESS_S = 2.0  # to start another process; measured, with its imports


class Head:
    """The first *steps* steps of a source."""

    def __init__(self, source: TraceSource, steps: int) -> None:
        """Look at *source*, which is not changed."""
        self._source, self._steps = source, steps
        self.header = source.header

    def columns(self) -> Iterator[Columns]:
        """Yield the rows in chunks."""
        for rows in self._source.columns():
            if rows.step[-1] < self._steps:
                yield rows
                continue
            head = rows.take(rows.step < self._steps)
            if len(head):
                yield head
            return

    def batches(self) -> Iterator[LayerBatch]:
        """Yield the batches in forward order."""
        return batches_of(self.columns())


def estimate_s(points: list[Point], jobs: int) -> float | None:
    """Return how many seconds *points* take in *jobs* processes.

    None if those tried fail, and for live models, whose speed is not known before they run.
    """
    if any(point.config.live is not None for point in points):
        return None
    known: dict[str, int] = {}
    tried = [_cost(point, _steps(point, known)) for point in (points[0], points[-1])]
    costs = [cost for cost in tried if cost is not None]
    if not costs:
        return None
    steps = sum(_steps(point, known) for point in points)
    fixed, per_step = fmean(c[0] for c in costs), fmean(c[1] for c in costs)
    n = jobs if jobs > 0 else os.cpu_count() or 1
    n = min(n, len(points))
    return (fixed * len(points) + per_step * steps) / n + (PROCESS_S if n > 1 else 0)


def _cost(point: Point, total: int) -> tuple[float, float] | None:
    """Return seconds per run and per step, from runs over more and more of the source."""
    source = open_source(point.config).source
    steps = FIRST_STEPS
    try:
        fixed = _seconds(point, source, 1)
        while True:
            steps = min(steps, total)
            took = _seconds(point, source, steps)
            if took > ENOUGH_S or steps == total:
                return fixed, max(took - fixed, 0) / steps
            steps *= 4
    except InputError:
        return None


def _seconds(point: Point, source: TraceSource, steps: int) -> float:
    setting = setting_of(point.config, load_hardware(point.config.hardware))
    begin = time.perf_counter()
    simulate(Head(source, steps), setting)
    return time.perf_counter() - begin


def _steps(point: Point, known: dict[str, int]) -> int:
    """Return the number of steps of a point's source; *known* holds those counted before."""
    opened = open_source(point.config)
    if opened.fingerprint not in known:
        known[opened.fingerprint] = extent_of(opened.source).steps
    return known[opened.fingerprint]
