"""This module looks at a whole sweep: gaps to the oracle, and arms that do not differ."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from moetier.experiments.points import Point
from moetier.experiments.resolve import full_policy

NO_GAIN = 0.001
"""An oracle that saves less than this share of lookups is said to gain nothing."""

_LEFT_OUT = ("config", "warnings", "known_limitations", "provenance", "key", "status", "error")

Outcomes = Mapping[str, dict[str, Any]]


def flatten(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of *outcome* in one level: `energy_breakdown.links` and so on."""
    flat: dict[str, Any] = {}
    for name, value in outcome.items():
        if name in _LEFT_OUT or name == "traceback":
            continue
        if isinstance(value, dict):
            flat |= {sys.intern(f"{name}.{key}"): item for key, item in value.items()}
        else:
            flat[name] = value
    return flat


def judge(points: list[Point], outcomes: Outcomes) -> tuple[list[float | None], list[str]]:
    """Return each point's distance to Belady (None without such an arm), and warnings."""
    policies = {point.key: full_policy(point.config.policy) for point in points}
    scenes: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        scenes[_scene(point)].append(point)
    gaps: dict[str, float | None] = {}
    warnings = _identical(points, outcomes)
    for scene in scenes.values():
        done = [point for point in scene if outcomes[point.key]["status"] == "done"]
        oracles = [point for point in done if is_oracle(policies[point.key])]
        for point in done:
            oracle = _oracle_of(point, oracles, policies)
            gaps[point.key] = _gap(outcomes[point.key], outcomes[oracle.key] if oracle else None)
            if oracle and _is_lru(policies[point.key]) and _gains_nothing(gaps[point.key]):
                warnings.append(
                    f"no cache opportunity at {_place(point)}: even the oracle saves less than "
                    f"{NO_GAIN:.1%} of lookups over on-demand LRU"
                )
    first = {point.key: point for point in reversed(points)}
    for key, outcome in outcomes.items():
        warnings += [f"{text} ({first[key].label})" for text in outcome.get("warnings", [])]
    return [gaps.get(point.key) for point in points], list(dict.fromkeys(warnings))


def _scene(point: Point) -> str:
    """Return everything but the policy: arms of one scene can be compared."""
    data = point.config.model_dump(mode="json", exclude={"policy", "name"})
    return json.dumps(data, sort_keys=True)


def _eviction(policy: Mapping[str, Any]) -> str:
    """Return the name of the fastest tier's eviction policy."""
    value = policy["eviction"]
    if isinstance(value, dict) and "kind" not in value:
        value = next(iter(value.values()), "lru")
    return str(value["kind"] if isinstance(value, dict) else value)


def is_oracle(policy: Mapping[str, Any]) -> bool:
    """Return whether *policy* evicts like Belady, and prefetches nothing."""
    return _eviction(policy) == "belady" and bool(policy["prefetch"] == "none")


def _oracle_of(
    point: Point, oracles: list[Point], policies: Mapping[str, dict[str, Any]]
) -> Point | None:
    """Return the oracle that needs the same slices from the same start."""
    mine = policies[point.key]
    for arm in oracles:
        other = policies[arm.key]
        if all(mine[seam] == other[seam] for seam in ("routing", "precision", "warmup")):
            return arm
    return None


def _gap(mine: Mapping[str, Any], oracle: Mapping[str, Any] | None) -> float | None:
    if oracle is None or mine["miss_rate"] is None or oracle["miss_rate"] is None:
        return None
    gap: float = mine["miss_rate"] - oracle["miss_rate"]
    return gap


def _is_lru(policy: Mapping[str, Any]) -> bool:
    demand_only = policy["prefetch"] == "none" and policy["miss"] == "fetch"
    return demand_only and _eviction(policy) == "lru"


def _gains_nothing(gap: float | None) -> bool:
    return gap is not None and gap < NO_GAIN


def _identical(points: list[Point], outcomes: Outcomes) -> list[str]:
    """Return a warning for every group of points that differ in config and not in records."""
    groups: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        if outcomes[point.key]["status"] == "done":
            groups[outcomes[point.key]["provenance"]["records"]].append(point)
    found = []
    for group in groups.values():
        scenes: dict[str, list[Point]] = defaultdict(list)
        for point in group:
            scenes[_scene(point)].append(point)
        for scene in scenes.values():
            if len(scene) > 1:
                names = " and ".join(str(p.values.get("policy", p.label)) for p in scene)
                found.append(f"policy inert: {names} gave identical records at {_place(scene[0])}")
        firsts = [scene[0] for scene in scenes.values()]
        if len(firsts) > 1:
            names = "; ".join(point.label for point in firsts)
            found.append(f"no effect: these points gave identical records: {names}")
    return found


def _place(point: Point) -> str:
    """Return the swept values but the policy, as text."""
    rest = [f"{k}={v}" for k, v in point.values.items() if not k.startswith("policy")]
    return ", ".join(rest) or "this setting"
