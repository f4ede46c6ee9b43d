"""Tests of what is said about a sweep as a whole."""

from __future__ import annotations

from typing import Any

import pytest

from moetier.experiments.findings import flatten, judge
from moetier.experiments.points import Point, expand_points


def points_of(run_keys: dict[str, Any], **lists: list[Any]) -> list[Point]:
    grid = {key.replace("__", "."): values for key, values in lists.items()}
    return expand_points(run_keys, grid, {}, "s")


def outcomes_of(points: list[Point], *rates: float, **more: Any) -> dict[str, dict[str, Any]]:
    """Return outcomes with the given miss rates; records are equal where rates are."""
    return {
        point.key: {
            "status": "done",
            "miss_rate": rate,
            "warnings": [],
            "provenance": {"records": str(rate)},
            **more,
        }
        for point, rate in zip(points, rates, strict=True)
    }


def test_an_inert_policy_is_named(run_keys: dict[str, Any]) -> None:
    points = points_of(run_keys, policy=["on-demand", "previous-token"])

    _, warnings = judge(points, outcomes_of(points, 0.5, 0.5))

    assert warnings == [
        "policy inert: on-demand and previous-token gave identical records at this setting"
    ]


def test_a_key_without_effect_is_named(run_keys: dict[str, Any]) -> None:
    points = points_of(run_keys, capacity__dram=["50 %", "60 %"])

    _, warnings = judge(points, outcomes_of(points, 0.5, 0.5))

    assert warnings == [
        "no effect: these points gave identical records: capacity.dram=50 %; capacity.dram=60 %"
    ]


def test_arms_that_differ_are_not_warned_about(run_keys: dict[str, Any]) -> None:
    points = points_of(run_keys, policy=["on-demand", "previous-token"])

    assert judge(points, outcomes_of(points, 0.5, 0.4)) == ([None, None], [])


@pytest.mark.parametrize(
    ("lru", "warned"), [(0.5, True), (0.5005, True), (0.502, False), (0.9, False)]
)
def test_no_cache_opportunity_is_said_where_the_oracle_gains_nothing(
    lru: float, warned: bool, run_keys: dict[str, Any]
) -> None:
    points = points_of(run_keys, policy=["on-demand", "belady"], capacity__dram=["50 %"])
    outcomes = outcomes_of(points, lru, 0.5)
    outcomes[points[0].key]["provenance"] = {"records": "other"}

    gaps, warnings = judge(points, outcomes)

    assert gaps == [lru - 0.5, 0.0]
    assert any("no cache opportunity at capacity.dram=50 %" in text for text in warnings) is warned


@pytest.mark.parametrize(
    ("policy", "has_gap"),
    [
        ("on-demand", True),
        ("previous-token", True),
        ({"eviction": "lfu"}, True),
        ({"eviction": {"dram": "lfu"}}, True),
        ({"eviction": "lru", "warmup": "random"}, False),
        ({"precision": {"kind": "uniform", "bits": 4}}, False),
    ],
)
def test_the_oracle_must_start_and_need_the_same(
    policy: Any, has_gap: bool, run_keys: dict[str, Any]
) -> None:
    points = points_of(run_keys, policy=[policy, {"eviction": {"dram": "belady"}}])

    gaps, _ = judge(points, outcomes_of(points, 0.5, 0.3))

    assert gaps[0] == (0.5 - 0.3 if has_gap else None)


def test_each_capacity_has_its_own_oracle(run_keys: dict[str, Any]) -> None:
    points = points_of(run_keys, capacity__dram=["25 %", "50 %"], policy=["on-demand", "belady"])

    gaps, _ = judge(points, outcomes_of(points, 0.5, 0.25, 0.125, 0.0))

    assert gaps == [0.25, 0.0, 0.125, 0.0]


def test_a_failed_oracle_gives_no_gap(run_keys: dict[str, Any]) -> None:
    points = points_of(run_keys, policy=["on-demand", "belady"])
    outcomes = outcomes_of(points, 0.5, 0.3)
    outcomes[points[1].key] = {"key": points[1].key, "status": "failed", "error": "x"}

    assert judge(points, outcomes) == ([None, None], [])


def test_a_rate_that_is_not_known_gives_no_gap(run_keys: dict[str, Any]) -> None:
    points = points_of(run_keys, policy=["on-demand", "belady"])
    outcomes = outcomes_of(points, 0.5, 0.3)
    outcomes[points[0].key]["miss_rate"] = None

    assert judge(points, outcomes)[0] == [None, 0.0]


def test_warnings_of_runs_come_with_their_point(run_keys: dict[str, Any]) -> None:
    points = points_of(run_keys, policy=["on-demand", "belady"])
    outcomes = outcomes_of(points, 0.5, 0.3)
    outcomes[points[0].key]["warnings"] = ["LRU cliff: ..."]

    assert judge(points, outcomes)[1] == ["LRU cliff: ... (policy=on-demand)"]


def test_nested_metrics_become_columns() -> None:
    outcome = {
        "key": "k",
        "status": "done",
        "error": None,
        "tpot_ms": 1.5,
        "energy_breakdown": {"links": 2, "static": None},
        "config": {"seed": 3},
        "warnings": ["w"],
        "traceback": "...",
    }

    assert flatten(outcome) == {
        "tpot_ms": 1.5,
        "energy_breakdown.links": 2,
        "energy_breakdown.static": None,
    }
