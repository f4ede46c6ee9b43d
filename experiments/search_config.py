"""This module is the schema of a search: what is chosen, what it is judged by, and how long."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moetier.experiments.config import RunConfig, check_run, read_mapping
from moetier.experiments.files import inside
from moetier.experiments.quantities import QUANTITIES, Direction, quantity
from moetier.experiments.search_space import Space, read_space
from moetier.experiments.sources import open_source
from moetier.experiments.sweep import NESTED
from moetier.sim.metrics import Metrics
from moetier.sim.policy.base import Part
from moetier.sim.units import parse_share
from moetier.sim.yaml_input import check
from moetier.traces.errors import InputError, nearest

SEARCH_KEYS = ("objectives", "space", "trials", "sampler")

LIVE_ONLY = ("accuracy", "nll", "plain", "repetition_share")
"""What metrics begin with that only a model which runs can have."""

_WAYS: dict[str, Direction] = {
    "minimise": "lower", "minimize": "lower", "maximise": "higher", "maximize": "higher",
}  # fmt: skip


class SearchConfig(BaseModel):
    """A search: a base config, what may be chosen in it, and what makes a choice good.

    *objectives* are metrics, in a list, or each with `minimise` or `maximise`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")  # it names a folder
    base: dict[str, Any]  # a run, or most of one
    space: dict[str, Any] | None = None  # null: every part of every seam
    objectives: dict[str, str | None] | list[str] = Field(min_length=1)
    constraints: dict[str, str] = Field(default_factory=dict)  # metric: a limit, such as ">= 0.99"
    trials: int = Field(default=100, ge=1, le=100_000)  # that are tried in all
    seed: int = Field(default=0, ge=0)  # of the draws
    sampler: Literal["nsga2", "tpe", "random"] = "nsga2"  # of Optuna
    batch: int = Field(default=20, ge=2, le=1000)  # trials chosen together, before any has run


@dataclass(frozen=True)
class Goal:
    """A metric to make small or large."""

    name: str
    better: Direction


@dataclass(frozen=True)
class Limit:
    """A metric that must not pass a value."""

    name: str
    better: Direction  # "lower" stands for `<=`
    value: float

    def excess(self, found: float | None) -> float:
        """Return by how much *found* misses the limit, relative to it; at most 0 where it holds."""
        if found is None:
            return float("inf")
        over = found - self.value if self.better == "lower" else self.value - found
        return over / (abs(self.value) or 1.0)

    def __str__(self) -> str:
        """Write it as in a config."""
        return f"{self.name} {'<=' if self.better == 'lower' else '>='} {self.value:g}"


@dataclass(frozen=True)
class Search:
    """A checked search."""

    config: SearchConfig
    space: Space
    goals: list[Goal]
    limits: list[Limit]
    where: str


def load_search(path: str | Path, overrides: list[str] | None = None) -> Search:
    """Return the search that the YAML file *path* describes; raise `InputError` for what is wrong.

    An override names a key of the search (`trials`, `constraints.accuracy`) or else one of `base`.
    """
    known = tuple(SearchConfig.model_fields)
    texts = [
        text if re.split(r"[.=]", text)[0] in known else f"base.{text}" for text in overrides or []
    ]
    data = read_mapping(path, texts)
    if "objectives" not in data and ("sweep" in data or "hardware" in data):
        raise InputError(
            "this is no search",
            where=path,
            way_out="give `base`, `objectives` and, if you like, `space` and `constraints`",
        )
    return check_search(data, str(path))


def check_search(data: dict[str, Any], where: str) -> Search:
    """Return *data* as a search whose names all exist; *where* says where it was given."""
    config = check(SearchConfig, data, where)
    base = check_run(config.base, f"{where}: base")
    with inside(where):
        goals = _goals(config.objectives)
        limits = [_limit(name, text) for name, text in config.constraints.items()]
        judged = [*(goal.name for goal in goals), *(limit.name for limit in limits)]
        space = read_space(config.space, _why_not(base, judged))
    return Search(config, space, goals, limits, where)


def _goals(given: dict[str, str | None] | list[str]) -> list[Goal]:
    asked = given if isinstance(given, dict) else dict.fromkeys(given)
    found = []
    for name, way in asked.items():
        _check_metric(name, "objectives")
        better = quantity(name).better if way is None else _WAYS.get(way)
        if better is None:
            raise InputError(
                f"'{name}' has no better direction" if way is None else f"'{way}' is no direction",
                where=f"objectives.{name}",
                way_out="write `minimise` or `maximise`",
            )
        found.append(Goal(name, better))
    return found


def _limit(name: str, text: str) -> Limit:
    where = f"constraints.{name}"
    _check_metric(name, "constraints")
    match = re.fullmatch(r"\s*(<=|>=)\s*(\S+(?:\s*%)?)\s*", text)
    try:
        if match is None:
            raise ValueError
        number = match[2]
        value = float(parse_share(number)) if number.endswith("%") else float(number)
        if not isfinite(value):
            raise ValueError
    except ValueError:
        raise InputError(
            f"cannot read {text!r}", where=where, way_out='write ">= 0.95" or "<= 10 %"'
        ) from None
    return Limit(name, "lower" if match[1] == "<=" else "higher", value)


def _check_metric(name: str, key: str) -> None:
    known = {*QUANTITIES, *Metrics().summary(), "elapsed_ms", "expert_bytes_total"} - {*NESTED}
    first = name.partition(".")[0]
    if name in known or ("." in name and first in ("capacity", *NESTED)):
        return
    way_out = nearest(name, known) or "docs/metrics.md lists metrics; capacity.TIER is one too"
    raise InputError(f"no metric '{name}'", where=key, way_out=way_out)


def column(name: str) -> str:
    """Return the column of results that holds the metric *name*."""
    first, _, tier = name.partition(".")
    return f"capacity_bytes.{tier}" if first == "capacity" else name


def value_of(row: Mapping[str, Any], name: str) -> float | None:
    """Return the metric *name* of a *row* of results; None where it is not known."""
    found = row.get(column(name))
    return None if found is None else float(found)


def _why_not(base: RunConfig, judged: list[str]) -> Any:
    """Return what says why a part is no use on the source of *base*, *judged* by these metrics."""
    header = None if base.live is not None else open_source(base).source.header
    predicted = base.predictor is not None or (header is not None and bool(header.predictors))
    scored = header is None or header.score_kind not in ("none", "unknown")
    weighed = header is None or "weights" not in header.unknown
    heeded = any(name.startswith(LIVE_ONLY) for name in judged)

    def why_not(part: Part) -> str | None:
        checks = (
            (part.needs_future, "an oracle: it knows the future"),
            (part.uses_predictions and not predicted, "the source has no predictions"),
            (part.needs_popularity and base.popularity is None, "no `popularity` is given"),
            (part.needs_scores and not scored, "the source has no router scores"),
            (part.needs_weights and not weighed, "the source has no gate weights"),
            (part.alters_output and not heeded, "lossy, and nothing judged says what that costs"),
        )
        return next((reason for applies, reason in checks if applies), None)

    return why_not
