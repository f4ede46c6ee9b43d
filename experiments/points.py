"""This module turns a sweep into its points: checked run configs, each with a key."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import moetier
from moetier.experiments.config import (
    OWN,
    RunConfig,
    check_run,
    load_hardware,
    policy_label,
    spell_capacity,
)
from moetier.experiments.files import inside
from moetier.experiments.live_runs import live_key
from moetier.experiments.overrides import set_key
from moetier.experiments.resolve import resolved
from moetier.experiments.sources import open_source, open_trace_file
from moetier.traces.errors import InputError


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its config, the swept values that chose it, and a key for its content."""

    key: str
    config: RunConfig
    values: dict[str, Any]

    @property
    def label(self) -> str:
        """Return the swept values as text."""
        return ", ".join(f"{key}={value}" for key, value in self.values.items()) or "the only point"


def expand_points(
    base: Mapping[str, Any],
    grid: Mapping[str, list[Any]],
    together: Mapping[str, list[Any]],
    where: str,
) -> list[Point]:
    """Return every combination of the values in *grid*, each with every row of *together*.

    Raises:
        InputError: If a point is not a run; names *where*, the point, the key and the value.
    """
    rows = list(zip(*together.values(), strict=True)) if together else [()]
    points = []
    for row, *chosen in itertools.product(rows, *grid.values()):
        values = {**dict(zip(grid, chosen, strict=True)), **dict(zip(together, row, strict=True))}
        data = copy.deepcopy(dict(base))
        shown = {key: spell(key, value) for key, value in values.items()}
        place = (
            f"{where}, point {', '.join(f'{k}={v}' for k, v in shown.items())}" if values else where
        )
        with inside(place):
            for key, value in values.items():
                set_key(data, key, copy.deepcopy(value))
        config = check_run(data, place)
        with inside(place):
            points.append(Point(key_of(config), config, shown))
    return points


def spell(key: str, value: Any) -> Any:
    """Return a swept value as tables and figures show it."""
    if key == "policy" and isinstance(value, str | dict):
        return policy_label(value)
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return json.dumps(value)


def axes(point: Point) -> dict[str, Any]:
    """Return what describes a point in a table of results: the usual keys, then the swept ones."""
    config = point.config
    source = config.trace or (config.synthetic.geometry if config.synthetic else config.live)
    return {
        "policy": policy_label(config.policy),
        "hardware": config.hardware,
        "source": source,
        **{f"capacity.{tier}": spell_capacity(size) for tier, size in config.capacity.items()},
        **{key: value for key, value in point.values.items() if key not in ("policy", "hardware")},
    }


def key_of(config: RunConfig) -> str:
    """Return a name for everything that decides a run's outcome; equal content, equal name.

    Files count by their content, so moving one changes nothing, and editing one changes the key.
    """
    data = resolved(config)
    for key in ("name", "trace", "synthetic"):
        data.pop(key, None)
    if config.live is not None:
        data.pop("live")
        data["evaluate"].pop("prompts")
        found = data["source"] = live_key(config)
        if "predictor" in found:  # a file, which counts by its content
            data.pop("predictor")
    else:
        with inside("source"):
            opened = open_source(config)
        data["source"] = opened.fingerprint
        data["geometry"] = opened.source.header.geometry.model_dump(mode="json")
    data["hardware"] = _profile(config.hardware)
    if config.popularity not in (None, OWN):
        with inside("popularity"):
            data["popularity"] = open_trace_file(config.popularity).fingerprint
    text = json.dumps([moetier.__version__, data], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


@lru_cache(maxsize=64)
def _profile(name: str) -> str:
    return load_hardware(name).model_dump_json()


def check_axes(grid: Mapping[str, Any], together: Mapping[str, Any], where: str) -> None:
    """Check the lists of a sweep: not empty, no key twice, and those of `zip` equally long."""
    for block, lists in (("sweep", grid), ("zip", together)):
        for key, values in lists.items():
            if not isinstance(values, list) or not values:
                raise InputError(
                    f"{block}.{key}: expected a list of values, got {values!r}",
                    where=where,
                    way_out="a single value belongs into `base`",
                )
    for key in together:
        if key in grid:
            raise InputError(
                f"'{key}' is in `sweep` and in `zip`", where=where, way_out="keep one of them"
            )
    lengths = {key: len(values) for key, values in together.items()}
    if len(set(lengths.values())) > 1:
        raise InputError(
            f"zip: its lists differ in length: {lengths}",
            where=where,
            way_out="`zip` takes the values in step; use `sweep` for all combinations",
        )
