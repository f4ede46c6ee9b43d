"""Tests of what a search chooses from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from moetier.experiments.search_space import Dimension, Space, derived, read_space
from moetier.sim.policy.base import Part
from moetier.sim.policy.compose import compose
from moetier.sim.policy.seams import SEAMS
from moetier.traces.errors import InputError
from moetier.traces.registry import Natural, Positive, Share


def anything(part: Part) -> None:
    return None


def space_of(**given: Any) -> Space:
    return read_space({key.replace("__", "."): value for key, value in given.items()}, anything)


def dimensions(space: Space) -> dict[str, list[Any]]:
    return {item.name: item.values for item in space.dimensions}


def test_without_a_space_every_part_of_every_seam_is_tried() -> None:
    space = read_space(None, anything)

    assert {key: [option.label for option in parts] for key, parts in space.seams.items()} == {
        seam: registry.names() for seam, registry in SEAMS.items()
    }
    assert space.left_out == {}


@pytest.mark.parametrize("last", [False, True])
def test_every_part_can_be_made_from_the_ends_of_its_ranges(last: bool) -> None:
    space = read_space(None, anything)
    for seam, options in space.seams.items():
        for option in options:
            ends = {item.name: item.values[-last] for item in option.chosen}

            part = space.pick(ends | {seam: option.label})[f"policy.{seam}"]

            kind = part if isinstance(part, str) else part["kind"]
            assert kind == option.label
            assert compose({seam: part}).parts


def test_what_is_no_use_is_left_out_with_its_reason() -> None:
    space = read_space({"eviction": "all"}, lambda part: "why" if part.needs_future else None)

    assert space.left_out == {"eviction belady": "why"}
    assert "belady" not in dimensions(space)["eviction"]
    assert "lru" in dimensions(space)["eviction"]


def test_what_is_asked_for_by_name_is_tried_all_the_same() -> None:
    space = read_space({"eviction": ["lru", "belady"]}, lambda part: "why")

    assert dimensions(space) == {"eviction": ["lru", "belady"]}
    assert space.left_out == {}


def test_parts_with_ranges_lists_and_fixed_parameters() -> None:
    part = {"kind": "cache-prior", "strength": {"low": 0, "high": 1, "step": 0.5}, "top": [0, 2]}
    space = space_of(routing=["exact", {**part, "ema": 0.5}])

    assert dimensions(space) == {
        "routing": ["exact", "cache-prior"],
        "routing.cache-prior.strength": [0.0, 0.5, 1.0],
        "routing.cache-prior.top": [0, 2],
    }
    values = {"routing": "cache-prior", "routing.cache-prior.strength": 0.5}
    assert space.pick(values) == {
        "policy.routing": {"kind": "cache-prior", "ema": 0.5, "strength": 0.5, "top": 0}
    }
    assert space.pick(values | {"routing": "exact"}) == {"policy.routing": "exact"}


def test_a_part_may_be_given_twice() -> None:
    uniform = [{"kind": "uniform", "bits": 8, "group": [32, 64]}, {"kind": "uniform", "bits": 4}]

    space = space_of(precision=uniform)

    assert dimensions(space)["precision"] == ["uniform", "uniform#2"]
    found = space.pick({"precision": "uniform#2", "precision.uniform.group": 64})
    assert found == {"policy.precision": {"kind": "uniform", "bits": 4}}


def test_eviction_may_be_chosen_tier_by_tier() -> None:
    space = space_of(eviction__hbm=["lru", "lfu"], eviction__dram=["fifo", "lru"])

    found = space.pick({"eviction.hbm": "lfu", "eviction.dram": "lru"})

    assert found == {"policy.eviction": {"hbm": "lfu", "dram": "lru"}}


@pytest.mark.parametrize(
    ("given", "values"),
    [
        (["10 %", "2 GiB"], ["10 %", "2 GiB"]),
        ({"low": "10 %", "high": "30 %", "step": "10 %"}, ["10 %", "20 %", "30 %"]),
        ({"low": "10 %", "high": "25 %", "step": "10 %"}, ["10 %", "20 %", "25 %"]),
        ({"low": "1 GiB", "high": "3 GiB", "step": "1 GiB"}, ["1 GiB", "2 GiB", "3 GiB"]),
    ],
)
def test_capacities(given: Any, values: list[str]) -> None:
    assert dimensions(space_of(capacity__dram=given)) == {"capacity.dram": values}


def test_a_range_without_a_step_is_cut_into_twenty() -> None:
    floats = dimensions(space_of(synthetic__reuse={"low": 0.0, "high": 1.0}))["synthetic.reuse"]
    whole = dimensions(space_of(seed={"low": 0, "high": 40}))["seed"]
    few = dimensions(space_of(seed={"low": 1, "high": 4}))["seed"]

    assert floats == [round(0.05 * at, 2) for at in range(21)]
    assert whole == list(range(0, 41, 2))
    assert few == [1, 2, 3, 4]
    assert all(isinstance(value, int) for value in whole + few)


@pytest.mark.parametrize(
    ("hint", "default", "expected"),
    [
        (bool, True, [False, True]),
        (Literal["a", "b"], "a", ["a", "b"]),
        (Natural, 2, list(range(9))),
        (Natural, 0, [0, 1, 2, 3]),
        (Positive, 1, [1, 2, 3, 4]),
        (Positive, 32, [16, 32, 64]),
        (int | None, None, []),
        (str, "x", []),
    ],
)
def test_ranges_follow_from_types(hint: Any, default: Any, expected: list[Any]) -> None:
    assert derived(hint, default)[0] == expected


@pytest.mark.parametrize(
    ("hint", "default", "low", "high"),
    [
        (Share, 0.9, 0.0, 1.0),
        (Annotated[float, Field(ge=0)], 0.2, 0.0, 1.0),
        (Annotated[float, Field(ge=0)], 2.0, 0.0, 8.0),
        (float, 0.1, 0.0, 1.0),
    ],
)
def test_ranges_of_floats_follow_from_limits_and_defaults(
    hint: Any, default: float, low: float, high: float
) -> None:
    values, ordered = derived(hint, default)

    assert (values[0], values[-1], len(values), ordered) == (low, high, 21, True)


def test_labels_are_read_back_by_json() -> None:
    assert Dimension("x", [[8, 4], "a", 1, True]).labels == ["[8, 4]", '"a"', "1", "true"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rooting": ["exact", "cumsum"]}, r"or key 'rooting'; did you mean 'routing'"),
        ({"routing": ["exact", "cumsun"]}, r"unknown routing 'cumsun'; did you mean 'cumsum'"),
        ({"routing": [{"kind": "cumsum", "mas": [0, 1]}]}, r"'mas'; did you mean 'mass'"),
        ({"routing": [{"kind": "cumsum", "mass": 2}]}, r"parameter 'mass'"),
        ({"precision": ["full", "uniform"]}, r"parameter 'bits'"),
        ({"routing": [{"mass": 1}]}, r"with `kind`"),
        ({"routing": "exact"}, r"expected a list of parts or 'all'"),
        ({"routing": []}, r"expected a list of parts or 'all'"),
        ({}, r"space: there is nothing to choose"),
        ({"routing": ["exact"]}, r"space: there is nothing to choose"),
        ({"seed": 3}, r"space\.seed: expected a list or a range, got 3"),
        ({"seed": {"low": 1, "high": 2, "stop": 3}}, r"expected a list or a range"),
        ({"seed": {"low": 2, "high": 1}}, r"is empty; put `low` first"),
        ({"seed": {"low": 1, "high": 2, "step": 0}}, r"is empty"),
        ({"capacity.dram": {"low": "x", "high": "9 %"}}, r"space\.capacity\.dram: "),
        ({"capacity.dram": {"low": "1 GiB", "high": "9 %"}}, r"cannot share a range"),
        ({"eviction": ["lru", "lfu"], "eviction.hbm": ["lru"]}, r"exclude each other"),
        ({"policy": ["belady", "on-demand"], "routing": ["exact"]}, r"exclude each other"),
        ({"name": ["a", "b"]}, r"unknown seam or key 'name'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_space(given, anything)
