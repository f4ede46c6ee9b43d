"""Composing a policy: presets, seams, names, tiers, and what is wrong with a spec."""

from typing import Any

import numpy as np
import pytest

from moetier.sim.layout import Layout
from moetier.sim.policy.base import Context, Eviction
from moetier.sim.policy.compose import compose, expand, name_of, presets
from moetier.sim.policy.eviction.belady import Belady
from moetier.sim.policy.eviction.fifo import FIFO
from moetier.sim.policy.eviction.lfu import LFU
from moetier.sim.policy.eviction.lru import LRU
from moetier.sim.policy.prefetch.oracle import Oracle
from moetier.sim.policy.seams import DEFAULTS
from moetier.traces.errors import InputError


def test_nothing_said_means_every_default() -> None:
    assert expand({}) == DEFAULTS
    assert compose({}).name == "on-demand"


def test_a_preset_is_a_mapping_of_seams() -> None:
    assert expand("belady") == DEFAULTS | {"eviction": "belady"}
    given = {"preset": "fiddler", "eviction": "lru"}
    assert expand(given) == {**DEFAULTS, **presets()["fiddler"], "eviction": "lru"}


def test_who_changes_an_expanded_preset_changes_no_other() -> None:
    first = expand("fiddler")
    for value in first.values():
        if isinstance(value, dict):
            value.clear()

    assert expand("fiddler") == {**DEFAULTS, **presets()["fiddler"]}
    assert any(isinstance(value, dict) and value for value in expand("slicemoe").values())


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("fiddler", "fiddler"),
        ({"preset": "fiddler", "eviction": "lru"}, "fiddler eviction=lru"),
        ({"eviction": "lfu", "miss": "cpu"}, "eviction=lfu miss=cpu"),
        ({"miss": {"kind": "skip", "keep": 2}}, "miss=skip(keep=2)"),
        ({"eviction": {"hbm": "lru", "dram": "lfu"}}, "eviction=(hbm=lru,dram=lfu)"),
        ({}, "on-demand"),
        ({"name": "mine", "eviction": "lfu"}, "mine"),
    ],
)
def test_a_policy_is_named_by_what_differs(spec: Any, name: str) -> None:
    assert name_of(spec) == name


def test_one_eviction_is_that_of_the_fastest_tier() -> None:
    kinds = [type(part) for part in compose({"eviction": "lfu"}, ["hbm", "dram"]).eviction]

    assert kinds == [LFU, LRU]


def test_evictions_may_go_by_tier() -> None:
    policy = compose({"eviction": {"dram": {"kind": "lfu", "remember": False}}}, ["hbm", "dram"])
    upper, lower = policy.eviction

    assert type(upper) is LRU
    assert isinstance(lower, LFU)
    assert lower.remember is False
    assert len(policy.parts) == 7


def test_flags_are_those_of_any_part() -> None:
    assert compose("on-demand").alters_output is False
    assert compose({"miss": "skip"}).alters_output
    assert compose("belady").needs_future
    assert not compose("fiddler").needs_future
    assert compose({"prefetch": {"kind": "previous-token", "cancel": True}}).asks_lateness
    assert not compose("previous-token").asks_lateness


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fidler", "policy: unknown policy 'fidler'; did you mean 'fiddler'? presets: on-demand, "),
        (
            {"evict": "lru"},
            "policy: unknown seam 'evict'; did you mean 'eviction'? seams: routing, ",
        ),
        ({"name": 3}, "policy: name is 3; use a text"),
        ({"eviction": "lrv"}, "policy.eviction: unknown eviction 'lrv'; did you mean 'lru'?"),
        ({"miss": {"keep": 1}}, "policy.miss: expected a name or a mapping with `kind`, got"),
        ({"miss": 3}, "policy.miss: expected a name or a mapping with `kind`, got 3"),
        ({"eviction": {"vram": "lru"}}, "policy.eviction: no cached tier 'vram'; cached: hbm"),
        (
            {"miss": {"kind": "skip", "keep": "two"}},
            "policy.miss: miss 'skip', parameter 'keep': ",
        ),
    ],
)
def test_what_is_wrong_is_named(spec: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        compose(spec, ["hbm"])

    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("part", [Belady(), Oracle()])
def test_an_oracle_needs_a_future(part: Belady | Oracle) -> None:
    layout = Layout([[1]], n_experts=2)
    with pytest.raises(ValueError, match="needs the future, which a live source does not have"):
        part.start(Context(layout, 2, (), np.random.default_rng(0)))


def started(part: Eviction, *slices: int) -> Eviction:
    part.start(Context(Layout([[1]], n_experts=9), 9, (), np.random.default_rng(0)))
    part.insert(slices)
    return part


def test_lru_goes_by_last_use_and_fifo_by_arrival() -> None:
    for part, victims in ((LRU(), [1, 0]), (FIFO(), [0, 1])):
        started(part, 0, 1, 2).touch([2, 0])
        assert part.victims(2, {2}) == victims


def test_lfu_remembers_what_left_unless_told_not_to() -> None:
    for part, victim in ((LFU(), [1]), (LFU(remember=False), [0])):
        started(part, 0, 1).touch([0])
        part.touch([0, 1])
        part.forget([0])
        part.insert([0])
        part.touch([0] if part.remember else [])
        assert part.victims(1, ()) == victim


def test_all_that_is_not_pinned_goes_when_that_is_not_enough() -> None:
    for part in (LRU(), LFU(), FIFO()):
        assert sorted(started(part, 0, 1, 2).victims(99, {1})) == [0, 2]
        assert part.victims(99, {1}) == []
        assert part.victims(1, ()) == [1]


def test_the_heap_is_rebuilt_when_most_of_it_is_stale() -> None:
    part = LFU()
    started(part, *range(4))
    for turn in range(200):
        part.touch([turn % 4])

    assert len(part._heap) <= 64 + 4 * 4 + 1
    assert part.victims(1, ()) == [0]
