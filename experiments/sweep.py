"""This module runs a sweep: many points, in parallel, resumable, and none dropped silently."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moetier.experiments.bars import PARTS
from moetier.experiments.config import read_mapping
from moetier.experiments.findings import flatten, judge
from moetier.experiments.perform import Backend, check_backend, is_done, perform
from moetier.experiments.points import Point, axes, check_axes, expand_points
from moetier.experiments.quantities import QUANTITIES
from moetier.experiments.store import (
    SEARCH,
    SWEEP,
    Store,
    dump_json,
    versions,
    write_text,
    write_yaml,
)
from moetier.sim.metrics import Metrics
from moetier.sim.yaml_input import check
from moetier.traces.errors import InputError

OUT = "out"
"""Where sweeps go unless told otherwise: out/NAME."""

LIVE_NESTED = (
    "accuracy_by_task", "nll_by_task", "accuracy_difference", "nll_difference", "plain",
)  # fmt: skip

NESTED = ("energy_breakdown", "time_breakdown_ms", "capacity_bytes", *LIVE_NESTED)
"""Metrics with parts, which become columns such as `energy_breakdown.links`."""

BOUND = (
    "slices differ in size, for which Belady's rule is not optimal: oracle_gap is to a bound, "
    "not to the best that can be done"
)


class PlotConfig(BaseModel):
    """One figure: what to draw, of which columns of the results."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["pareto", "line", "breakdown", "scatter"]  # of figure
    x: str | None = None  # a metric, or a key of the sweep
    y: str | None = None  # likewise; the parts, for a breakdown
    hue: str | None = None  # one colour for each of its values


class SweepConfig(BaseModel):
    """A sweep: a base config, and lists of values for some of its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # of the folder under out/
    base: dict[str, Any]  # a run, or most of one
    sweep: dict[str, Any] = Field(default_factory=dict)  # key: values; every combination is a point
    zip: dict[str, Any] = Field(default_factory=dict)  # key: values that go in step
    plots: list[PlotConfig] = Field(default_factory=list)  # figures to draw
    records: bool = False  # keep the records of every point


@dataclass(frozen=True)
class Outcome:
    """What came of a sweep."""

    folder: Path
    rows: list[dict[str, Any]]
    warnings: list[str]
    resumed: int = 0
    failed: list[str] = field(default_factory=list)  # label: error


def load_sweep(path: str | Path, overrides: list[str] | None = None) -> SweepConfig:
    """Return the sweep that the YAML file *path* describes; its points are not looked at yet.

    An override names a key of the sweep (`sweep.policy`, `name`) or else one of `base`.
    """
    known = tuple(SweepConfig.model_fields)
    texts = [
        text if re.split(r"[.=]", text)[0] in known else f"base.{text}" for text in overrides or []
    ]
    data = read_mapping(path, texts)
    if "base" not in data and "hardware" in data:
        raise InputError(
            "this is one run, not a sweep",
            where=path,
            way_out="use `moetier simulate`, or put its keys under `base:`",
        )
    config = check(SweepConfig, data, str(path))
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", config.name):
        raise InputError(
            f"name: '{config.name}' cannot name a folder",
            where=path,
            way_out="use letters, digits, '.', '_' and '-'",
        )
    check_axes(config.sweep, config.zip, str(path))
    return config


def points_of(config: SweepConfig, where: str) -> list[Point]:
    """Return the points of *config*, all checked."""
    return expand_points(config.base, config.sweep, config.zip, where)


def check_plots(config: SweepConfig, points: list[Point], where: str) -> None:
    """Raise `InputError` when a plot names what the results will not have."""
    known = {
        *QUANTITIES,
        *Metrics().summary(),
        "elapsed_ms",
        "expert_bytes_total",
        "uniform_slices",
    }
    known |= {name for point in points for name in axes(point)}
    for at, plot in enumerate(config.plots):
        for key in ("x", "y", "hue"):
            name = getattr(plot, key)
            if name is None or name.partition(".")[0] in NESTED or name in known:
                continue
            if plot.kind == "breakdown" and key == "y" and name in PARTS:
                continue
            near = difflib.get_close_matches(name, sorted(known), n=1)
            raise InputError(
                f"plots.{at}.{key}: no metric or config key '{name}'",
                where=where,
                way_out=f"did you mean '{near[0]}'?" if near else "docs/metrics.md lists metrics",
            )


def run_sweep(
    config: SweepConfig,
    points: list[Point],
    folder: Path,
    *,
    jobs: int = 1,
    backend: Backend = "loky",
    on_done: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Run the *points* that *folder* does not hold yet, then gather all results there.

    *on_done* hears (points done, points in all), first of all how many were done before.
    """
    check_backend(backend)
    store = Store(folder)
    store.refuse(SEARCH, "a search")
    store.create()
    unique = {point.key: point for point in points}
    todo = [point for point in unique.values() if not is_done(store, point.key, config.records)]
    done = resumed = len(unique) - len(todo)
    if on_done is not None:
        on_done(done, len(unique))
    for _ in perform(todo, folder, config.records, jobs, backend):
        done += 1
        if on_done is not None:
            on_done(done, len(unique))
    return _gather(config, points, store, resumed)


def _gather(config: SweepConfig, points: list[Point], store: Store, resumed: int) -> Outcome:
    """Write the table of results with everything needed to understand it."""
    outcomes = {point.key: store.point(point.key) or _lost(point.key) for point in points}
    gaps, warnings = judge(points, outcomes)
    columns = dict.fromkeys(name for point in points for name in axes(point))
    rows, failed, limitations = [], [], dict[str, None]()
    for point, gap in zip(points, gaps, strict=True):
        found = outcomes[point.key]
        limitations |= dict.fromkeys(found.get("known_limitations", []))
        if gap is not None and not found["uniform_slices"]:
            limitations[BOUND] = None
        rows.append({
            **columns, **axes(point), "status": found["status"], "error": found["error"],
            **flatten(found), "oracle_gap": gap,
            "warnings": " | ".join(found.get("warnings", [])), "key": point.key,
        })  # fmt: skip
        if found["status"] != "done":
            failed.append(f"{point.label}: {found['error']}")
    store.gather(rows)
    write_yaml(store.folder / SWEEP, config.model_dump(mode="json", exclude_none=True))
    about = {
        "versions": versions(),
        "points": {p.key: {**axes(p), "status": outcomes[p.key]["status"]} for p in points},
        "fingerprints": {p.key: outcomes[p.key].get("provenance") for p in points},
        "warnings": warnings,
        "known_limitations": list(limitations),
    }
    write_text(store.folder / "provenance.json", dump_json(about) + "\n")
    return Outcome(store.folder, rows, warnings, resumed, failed)


def _lost(key: str) -> dict[str, Any]:
    return {"key": key, "status": "failed", "error": "its result is not there"}
