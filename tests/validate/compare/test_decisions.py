"""Tests that no field of a plan can differ unseen."""

from __future__ import annotations

from typing import Any

import pytest

from moetier.sim.plan import LayerPlan
from moetier.traces.batch import DECODE, LayerBatch
from moetier.validate.compare.decisions import FIELDS, Decisions


def a_plan(step: int = 0, layer: int = 0, **given: Any) -> LayerPlan:
    batch = LayerBatch(step, DECODE, layer, 1, 1, given.pop("experts", [0, 1]))
    plan = LayerPlan(batch, given.pop("needed", [0, 1]), given.pop("missing", [1]))
    for name, value in given.items():
        setattr(plan, name, value)
    return plan


COUNTS = {
    "compulsory", "prefetch_used", "prefetch_wasted", "cpu_assignments", "skip_assignments",
    "spared", "lower_lookups", "lower_hits", "warmup_bytes", "resident", "peak",
}  # fmt: skip


@pytest.mark.parametrize("name", ["experts", *FIELDS])
def test_every_field_is_seen(name: str) -> None:
    same = [a_plan(), a_plan(step=3, layer=2)]
    value: Any = 5 if name in COUNTS else [5, 6]
    other = [a_plan(), a_plan(step=3, layer=2, **{name: value})]
    one, two = Decisions.of(same), Decisions.of(other)

    assert one.first_difference(two) == f"step 3, layer 2: {name}"
    assert one.digest != two.digest


def test_all_that_a_plan_decides_is_among_the_fields() -> None:
    """What is not is about the plan's own bookkeeping."""
    declared = set(vars(a_plan())) | set(LayerPlan.__annotations__)

    assert declared - {"batch", "early", "rare"} == set(FIELDS)


def test_order_counts_and_the_kind_of_sequence_does_not() -> None:
    listed = Decisions.of([a_plan(fetch=[2, 3])])

    assert listed.first_difference(Decisions.of([a_plan(fetch=(2, 3))])) is None
    assert listed.first_difference(Decisions.of([a_plan(fetch=[3, 2])])) is not None
    assert listed.digest == Decisions.of([a_plan(fetch=(2, 3))]).digest


def test_nothing_is_not_an_empty_list() -> None:
    none, empty = Decisions.of([a_plan(fetch_hops=None)]), Decisions.of([a_plan(fetch_hops=[])])

    assert none.first_difference(empty) == "step 0, layer 0: fetch_hops"


def test_the_first_of_several_differences_is_named() -> None:
    one = Decisions.of([a_plan(), a_plan(1), a_plan(2)])
    two = Decisions.of([a_plan(), a_plan(1, evicted=[4], skip=[1]), a_plan(2, fetch=[9])])

    assert one.first_difference(two) == "step 1, layer 0: evicted"


def test_other_batches_are_named() -> None:
    one = Decisions.of([a_plan(), a_plan(1, 3)])

    assert one.first_difference(Decisions.of([a_plan(), a_plan(2, 3)])) == (
        "batch 1 is step 1, layer 3, and step 2, layer 3"
    )
    assert one.first_difference(Decisions.of([a_plan()])) == "2 batches, and 1"
    assert Decisions.of([]).first_difference(Decisions.of([])) is None
    assert Decisions.of([a_plan()]).digest != Decisions.of([a_plan(1)]).digest
