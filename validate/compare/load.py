"""This module says how busy a machine was while something ran, with work that is not ours.

What others compute meanwhile makes repeats differ, so a comparison of times says how much it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STAT = Path("/proc/stat")
_IDLE = (3, 4)  # idle and waiting for a disk, among the columns of a processor's line


@dataclass
class Load:
    """How busy the machine was; None where nothing says so, and before the end."""

    cores: int
    load_average_before: float | None  # of the last minute
    load_average_after: float | None = None
    others_share: float | None = None  # of all cores' time, computing for other processes

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self)


@contextmanager
def watch_load(stat: Path = STAT) -> Iterator[Load]:
    """Yield what is complete when the block ends."""
    load = Load(os.cpu_count() or 1, _average())
    before, own = _ticks(stat), _own()
    yield load
    after, own = _ticks(stat), _own() - own
    load.load_average_after = _average()
    if before is not None and after is not None and after[1] > before[1]:
        busy, total = after[0] - before[0], after[1] - before[1]
        load.others_share = min(max((busy - own) / total, 0.0), 1.0)


def _average() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def _own() -> float:
    """Return the seconds that this process and its children have computed."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _ticks(stat: Path) -> tuple[float, float] | None:
    """Return the seconds that all cores together have computed, and have been there."""
    try:
        names, *rows = stat.read_text(encoding="ascii").split("\n", 1)[0].split()
    except OSError:
        return None
    counts = [int(row) for row in rows[:8]]  # what guests take is in the first two already
    if names != "cpu" or len(counts) <= max(_IDLE):
        return None
    second = os.sysconf("SC_CLK_TCK")
    total = sum(counts)
    return (total - sum(counts[at] for at in _IDLE)) / second, total / second
