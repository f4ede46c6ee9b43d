"""Tests of the schema of a search."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moetier.experiments.search_config import (
    Goal,
    Limit,
    Search,
    check_search,
    load_search,
    value_of,
)
from moetier.traces.errors import InputError


@pytest.fixture
def keys(run_keys: dict[str, Any]) -> dict[str, Any]:
    return {"name": "small", "base": run_keys, "objectives": ["tpot_ms", "capacity.dram"]}


def search_of(keys: dict[str, Any], **changes: Any) -> Search:
    return check_search(keys | changes, "s")


def test_directions_default_to_what_is_known_of_a_metric(keys: dict[str, Any]) -> None:
    asked = {"tokens_per_s": None, "energy_breakdown.links": "minimize", "accuracy": "maximise"}

    assert search_of(keys).goals == [Goal("tpot_ms", "lower"), Goal("capacity.dram", "lower")]
    assert search_of(keys, objectives=asked).goals == [
        Goal("tokens_per_s", "higher"),
        Goal("energy_breakdown.links", "lower"),
        Goal("accuracy", "higher"),
    ]


def test_limits_are_read(keys: dict[str, Any]) -> None:
    limits = search_of(keys, constraints={"miss_rate": "<= 10 %", "accuracy": ">=0.95"}).limits

    assert limits == [Limit("miss_rate", "lower", 0.1), Limit("accuracy", "higher", 0.95)]
    assert [str(limit) for limit in limits] == ["miss_rate <= 0.1", "accuracy >= 0.95"]


def test_the_excess_is_relative_to_the_limit() -> None:
    assert Limit("x", "lower", 10).excess(15) == 0.5
    assert Limit("x", "lower", 10).excess(10) == 0
    assert Limit("x", "higher", 10).excess(5) == 0.5
    assert Limit("x", "higher", 10).excess(15) == -0.5
    assert Limit("x", "lower", 0).excess(3) == 3
    assert Limit("x", "lower", 10).excess(None) == float("inf")


def test_a_capacity_is_judged_in_bytes() -> None:
    row = {"capacity.dram": "25 %", "capacity_bytes.dram": 4096, "tpot_ms": 2}

    assert value_of(row, "capacity.dram") == 4096
    assert value_of(row, "tpot_ms") == 2
    assert value_of(row, "accuracy") is None


def test_a_lossy_part_is_tried_only_where_its_cost_is_judged(keys: dict[str, Any]) -> None:
    speed, heeded = search_of(keys), search_of(keys, constraints={"accuracy": ">= 0.5"})

    assert "nothing judged" in speed.space.left_out["miss skip"]
    assert "miss skip" not in heeded.space.left_out
    assert "knows the future" in heeded.space.left_out["eviction belady"]
    assert "no predictions" in heeded.space.left_out["prefetch predicted"]
    assert "popularity" in heeded.space.left_out["eviction static"]


def test_a_predictor_and_a_popularity_let_parts_in(keys: dict[str, Any]) -> None:
    more = {"predictor": {"kind": "recall-model", "recall": [0.8]}, "popularity": "own"}

    left_out = search_of(keys, base=keys["base"] | more).space.left_out

    assert "prefetch predicted" not in left_out
    assert "eviction static" not in left_out


def test_a_live_model_has_scores() -> None:
    keys = {"base": {"live": "moe-tiny", "hardware": "phone-ufs4"}, "objectives": ["accuracy"]}

    left_out = check_search({"name": "x", **keys}, "s").space.left_out

    assert not {"routing cache-prior", "precision uniform", "miss skip"} & set(left_out)
    assert "eviction belady" in left_out


def test_overrides_name_keys_of_the_search_or_of_its_base(
    keys: dict[str, Any], write_yaml: Callable[..., Path]
) -> None:
    overrides = ["trials=7", "constraints.accuracy='>= 0.9'", "capacity.dram=40 %"]

    search = load_search(write_yaml(keys), overrides)

    assert search.config.trials == 7
    assert search.limits == [Limit("accuracy", "higher", 0.9)]
    assert search.config.base["capacity"] == {"dram": "40 %"}


def test_a_sweep_is_no_search(sweep_keys: dict[str, Any], write_yaml: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match=r"this is no search; give `base`, `objectives`"):
        load_search(write_yaml(sweep_keys))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objectives": ["tpot_m"]}, r"s: objectives: no metric 'tpot_m'; did you mean 'tpot_ms'"),
        ({"objectives": ["energy_breakdown"]}, r"no metric 'energy_breakdown'"),
        ({"objectives": []}, r"objectives"),
        ({"objectives": {"tpot_ms": "down"}}, r"'down' is no direction; write `minimise`"),
        ({"objectives": ["lookups"]}, r"'lookups' has no better direction"),
        ({"constraints": {"accuracyy": ">= 1"}}, r"constraints: no metric 'accuracyy'"),
        ({"constraints": {"accuracy": "> 1"}}, r"constraints\.accuracy: cannot read '> 1'"),
        ({"constraints": {"accuracy": ">= nan"}}, r"cannot read '>= nan'"),
        ({"constraints": {"accuracy": "<= 1e999"}}, r"cannot read '<= 1e999'"),
        ({"constraints": {"accuracy": ">= much"}}, r"cannot read '>= much'"),
        ({"name": "../x"}, r"name"),
        ({"trials": 0}, r"trials"),
        ({"sampler": "annealing"}, r"sampler"),
        ({"base": {"hardware": "phone-ufs4"}}, r"s: base: .*one routing source"),
        ({"space": {"routing": ["exact"]}}, r"s: space: there is nothing to choose"),
    ],
)
def test_what_is_wrong_is_named(
    changes: dict[str, Any], message: str, keys: dict[str, Any]
) -> None:
    with pytest.raises(InputError, match=message):
        search_of(keys, **changes)
