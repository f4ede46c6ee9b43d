"""This module reads recorded runs of BigMoeOnEdge: a CSV each, one line per decoded token.

A folder holds `runs/*.csv` and, where routing was recorded, `route.csv`. What a run was set to is
in its `#` lines; files older than these lines say it in their name, `k8_c4000_l4_ov_0714` or
`k8_stream` (experts per token, MiB of cache, I/O lanes, reads beside compute).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moetier.traces.errors import InputError
from moetier.traces.importers._csv import join, read_tables

Values = npt.NDArray[np.float64]

STREAM_LANES = 4  # of a run whose name says `stream` and no more

_NEEDED = {"step": int, "read_bytes": int, "wall_ms": float, "io_ms": float, "compute_ms": float}
_OPTIONAL = {"stall_ms": float, "mgmt_ms": float, "majflt": int, "cpu_ms": float}
_NAME = re.compile(r"k(?P<k>\d+)_(?:c(?P<c>\d+)|stream)(?:_l(?P<l>\d+))?(?P<ov>_ov)?(?:_\w+)?")
_FACT = re.compile(r"(\w+)=(\S+)")


@dataclass(frozen=True)
class Run:
    """What a run was set to, and its columns, one value per decoded token.

    Times are in ms. With *overlap* `io_ms` adds up the lanes and `compute_ms` is what waiting and
    management leave of the wall time; without, `io_ms` is wall time. Columns that the file lacks
    are absent: `mgmt_ms` is then part of `compute_ms`.
    """

    name: str
    top_k: int
    cache_mib: int  # 0: nothing is kept
    lanes: int
    overlap: bool
    eviction: str
    prompt: int  # tokens, 0 where the file does not say
    columns: Mapping[str, Values]

    def warm(self, name: str) -> Values:
        """Return column *name* over the last two thirds of the run; the first is cold."""
        return last_two_thirds(self.columns[name])

    def level(self, name: str) -> float:
        """Return the median of column *name* over the last two thirds; 0 where it is absent."""
        return float(np.median(self.warm(name))) if name in self.columns else 0.0


def last_two_thirds(values: Values) -> Values:
    """Return *values* without their first third."""
    return values[len(values) // 3 :]


def middle(run: Run) -> int:
    """Return how long the context is in the middle of the last two thirds, in tokens."""
    return run.prompt + 2 * len(run.columns["step"]) // 3


def read_runs(folder: Path) -> list[Run]:
    """Return the runs under *folder*, by name.

    Raises:
        InputError: If there are none, or one cannot be read; names the file and the line.
    """
    found = sorted((Path(folder) / "runs").glob("*.csv"))
    if not found:
        raise InputError("no runs/*.csv", where=folder, way_out="name a folder of recorded runs")
    return [read_run(path) for path in found]


def read_run(path: Path) -> Run:
    """Return the run in the CSV at *path*.

    Raises:
        InputError: If it is not such a file, or neither its `#` lines nor its name say how the run
            was set; names the file, the line or key, and the way out.
    """
    tables = list(read_tables(path, _NEEDED, _OPTIONAL))
    if not tables or sum(map(len, tables)) < 3:
        raise InputError("fewer than 3 decoded tokens", where=path, way_out="record it again")
    table = join(tables)
    columns = {name: np.asarray(x, np.float64) for name, x in table.columns.items()}
    for name in _NEEDED:
        bad = ~np.isfinite(columns[name]) | (columns[name] < 0)
        if bad.any():
            line, value = table.lines[np.argmax(bad)], columns[name][np.argmax(bad)]
            raise InputError(
                f"line {line}, column '{name}': {value}", where=path, way_out="expected 0 or more"
            )
    said = _facts(path)
    named = _NAME.fullmatch(path.stem)
    if "n_expert_used" in said and "io_threads" in said:
        top_k, lanes = _whole(said, "n_expert_used", path), _whole(said, "io_threads", path)
        cache, overlap = _whole(said, "cache_mb", path), said.get("overlap") == "1"
    elif named is not None:
        top_k, cache = int(named["k"]), int(named["c"] or 0)
        lanes, overlap = int(named["l"] or STREAM_LANES), named["ov"] is not None
    else:
        raise InputError(
            "does not say how it was run",
            where=path,
            way_out="add its '# model=' and '# moe_stream=' lines, or name it as k8_c4000_l4_ov",
        )
    if not top_k or not lanes:
        raise InputError(f"{top_k} experts, {lanes} lanes", where=path, way_out="at least 1 each")
    return Run(
        name=path.stem,
        top_k=top_k,
        cache_mib=cache,
        lanes=lanes,
        overlap=overlap,
        eviction=said.get("cache_policy", "lru"),
        prompt=_whole(said, "n_prompt", path, 0),
        columns=columns,
    )


def _facts(path: Path) -> dict[str, str]:
    """Return every `key=value` of the `#` lines."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return dict(fact for line in file if line.startswith("#") for fact in _FACT.findall(line))


def _whole(said: Mapping[str, str], key: str, path: Path, default: int | None = None) -> int:
    """Return the whole number that *key* has; *default* where the key is not there."""
    if key not in said and default is not None:
        return default
    text = said.get(key, "nothing")
    if not text.isdecimal():
        raise InputError(f"{key}: {text}", where=path, way_out="expected a whole number")
    return int(text)
