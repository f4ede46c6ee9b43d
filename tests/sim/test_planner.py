"""The planner: what it orders, what it refuses, and who has to give way.

One layer's slices follow the other's: with four experts a layer, layer 1 begins at slice 4.
"""

# ruff: noqa: D102, D107  (hooks are documented on the base classes)

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from moetier.sim.layout import Layout
from moetier.sim.plan import LayerPlan
from moetier.sim.planner import Planner
from moetier.sim.policy.base import Context, Eviction, Miss, Missed, Prefetch, Warmup
from moetier.sim.policy.compose import Policy, compose
from moetier.sim.policy.eviction.lru import LRU
from moetier.traces.batch import DECODE, PREFILL, LayerBatch

LAYERS = 4


class Wish(Prefetch):
    """Wants what a test says, batch by batch."""

    def __init__(self, *wishes: Sequence[int], cancel: bool = False) -> None:
        self.wishes = wishes
        self.cancel = self.asks_lateness = cancel

    def start(self, context: Context) -> None:
        super().start(context)
        self._next: Iterator[Sequence[int]] = iter(self.wishes)

    def candidates(self, batch: LayerBatch, needed: list[int]) -> Sequence[int]:
        return next(self._next, ())


class Idle:
    """A machine that starts no prefetch: all can be cancelled."""

    def landed(self, slice_id: int) -> bool:
        return False

    def queued_bytes(self) -> int:
        return 0

    def cancel(self, slices: Sequence[int]) -> list[int]:
        return list(slices)


def planner(
    capacity: int = 2, lower: int = 0, layout: Layout | None = None, **more: Any
) -> Planner:
    """Return a planner over slices of one byte; *more* holds parts of the policy, and keywords."""
    tiers = ("hbm", "dram") if lower else ("hbm",)
    policy: Policy = compose("on-demand", tiers)
    seams = {k: more.pop(k) for k in list(more) if k in Policy.__slots__}
    capacities = [capacity, lower] if lower else [capacity]
    layout = layout or Layout([[1]] * LAYERS, n_experts=4)
    return Planner(replace(policy, **seams), layout, capacities, lateness=Idle(), **more)


def batch(layer: int, *experts: int, phase: int = DECODE, tokens: int = 1) -> LayerBatch:
    return LayerBatch(0, phase, layer, tokens, 1, list(experts))


def lists(plan: LayerPlan) -> dict[str, list[int]]:
    names = ("needed", "fetch", "prefetch", "evicted", "cancelled", "demoted")
    return {name: list(getattr(plan, name)) for name in names if getattr(plan, name)}


def test_a_hit_orders_nothing() -> None:
    stepped = planner()

    assert lists(stepped.step(batch(0, 1))) == {"needed": [1], "fetch": [1]}
    assert lists(stepped.step(batch(0, 1))) == {"needed": [1]}


def test_eviction_runs_after_the_batch_and_spares_what_it_touched() -> None:
    stepped = planner(capacity=2)
    stepped.step(batch(0, 0, 1))
    plan = stepped.step(batch(1, 0, 1, 2))

    assert lists(plan) == {"needed": [4, 5, 6], "fetch": [4, 5, 6], "evicted": [0, 1]}
    assert (plan.peak, plan.resident) == (5, 3)  # more than the capacity: the batch's own set
    assert lists(stepped.step(batch(2, 0)))["evicted"] == [4, 5]


def test_a_batch_looks_each_slice_up_once() -> None:
    plan = planner(capacity=3).step(batch(0, 2, 1, 1, 2, 0, 2, tokens=3))

    assert plan.needed == plan.fetch == [2, 1, 0]
    assert plan.compulsory == 3


# -- prefetch


def test_a_prefetch_is_pinned_until_its_layer_has_run() -> None:
    stepped = planner(capacity=3, prefetch=Wish([8]))
    assert lists(stepped.step(batch(0, 0)))["prefetch"] == [8]
    stepped.step(batch(1, 0))
    plan = stepped.step(batch(1, 1))

    assert plan.evicted == [0]  # the oldest but one: 8 stays
    plan = stepped.step(batch(2, 1))
    assert plan.evicted == [8]  # its layer ran without it
    assert plan.prefetch_wasted == 1


def test_a_prefetch_must_fit_beside_the_batch_and_earlier_ones() -> None:
    stepped = planner(capacity=3, prefetch=Wish([4, 5, 6], [8, 9]))
    first, second = stepped.step(batch(0, 0)), stepped.step(batch(1, 0))

    assert lists(first)["prefetch"] == [4, 5]
    assert lists(second)["prefetch"] == [8, 9]  # layer 1 has run: 5 is free to go
    assert lists(second)["evicted"] == [0, 5]


def test_the_first_that_does_not_fit_ends_the_list() -> None:
    """Most wanted first: a smaller one further down does not overtake."""
    layout = Layout([[2], [3], [1], [1]], n_experts=4)
    plan = planner(capacity=6, layout=layout, prefetch=Wish([8, 4, 9])).step(batch(0, 0))

    assert plan.prefetch == [8, 4]
    plan = planner(capacity=5, layout=layout, prefetch=Wish([8, 4, 9])).step(batch(0, 0))
    assert plan.prefetch == [8]


def test_what_is_resident_or_named_twice_is_brought_once() -> None:
    plan = planner(capacity=4, prefetch=Wish([0, 4, 4])).step(batch(0, 0))

    assert plan.prefetch == [4]


def test_early_slices_give_way_to_a_batch_that_needs_their_room() -> None:
    """Two are pinned for layer 2 when a large batch of layer 1 takes the whole capacity."""
    stepped = planner(capacity=4, prefetch=Wish([8, 9]))
    stepped.step(batch(0, 0, 1))
    plan = stepped.step(batch(1, 0, 1, 2, 3))

    assert plan.resident == 4
    assert plan.evicted == [0, 1, 8, 9]
    assert plan.prefetch_wasted == 2
    assert lists(stepped.step(batch(2, 0)))["fetch"] == [8]


def test_what_was_just_evicted_and_is_wanted_again_stays_for_free() -> None:
    """Eviction happens after the batch, so 4 is still there when the prefetcher asks for it."""
    stepped = planner(capacity=2, prefetch=Wish([], [], [4]))
    stepped.step(batch(1, 0))
    stepped.step(batch(2, 0))
    plan = stepped.step(batch(0, 0))

    assert lists(plan) == {"needed": [0], "fetch": [0], "evicted": [8]}
    assert plan.missing == [0]
    assert not stepped.step(batch(1, 0)).missing


def test_a_withdrawn_prefetch_is_not_resident() -> None:
    stepped = planner(capacity=3, prefetch=Wish([4, 5], cancel=True))
    stepped.step(batch(0, 0))
    plan = stepped.step(batch(1, 1))

    assert lists(plan) == {"needed": [5], "cancelled": [4]}
    assert plan.prefetch_used == 1
    assert stepped.caches[0].resident == {0, 5}


# -- two caches


@pytest.mark.parametrize("exclusive", [False, True])
def test_a_withdrawn_prefetch_is_below_only_if_it_was(exclusive: bool) -> None:
    """4 was in the second tier, and is there when its way up is called off."""
    stepped = planner(
        capacity=2, lower=9, exclusive=exclusive, prefetch=Wish([], [], [], [4, 5], cancel=True)
    )
    for layer, expert in [(1, 0), (2, 0), (3, 0)]:
        stepped.step(batch(layer, expert))
    plan = stepped.step(batch(3, 0))
    assert plan.prefetch == [4]
    assert plan.prefetch_hops == [1]
    plan = stepped.step(batch(1, 2))

    assert (plan.cancelled, plan.cancelled_hops) == ([4], [1])
    assert 4 in stepped.caches[1].resident
    assert 4 not in stepped.caches[0].resident


def test_a_withdrawn_prefetch_from_the_bottom_was_never_above_it() -> None:
    stepped = planner(capacity=2, lower=9, prefetch=Wish([5], cancel=True))
    assert stepped.step(batch(0, 0)).prefetch_hops == [2]
    plan = stepped.step(batch(1, 0))

    assert (plan.cancelled, plan.cancelled_hops) == ([5], [2])
    assert 5 not in stepped.caches[1].resident


def test_a_full_second_tier_loses_what_is_demoted() -> None:
    stepped = planner(capacity=1, lower=1, exclusive=True)
    stepped.step(batch(0, 0))
    first, second = stepped.step(batch(0, 1)), stepped.step(batch(0, 2))

    assert (list(first.demoted), list(second.demoted)) == ([0], [1])
    assert stepped.step(batch(0, 0)).fetch_hops == [2]
    assert stepped.caches[1].resident == {2}


# -- warm-up


class Fixed(Warmup):
    """Begins decode with what a test says."""

    def __init__(self, *slices: int) -> None:
        self.slices = slices

    def decode_begins(self) -> Sequence[int] | None:
        return self.slices


def test_warm_up_replaces_what_prefill_left() -> None:
    stepped = planner(capacity=2, warmup=Fixed(1, 2), prefetch=Wish([4]))
    stepped.step(batch(0, 0, phase=PREFILL))
    plan = stepped.step(batch(0, 1))

    assert plan.replaced == [0, 4]
    assert plan.warmup_bytes == 2
    assert not plan.missing
    assert stepped.step(batch(0, 3)).evicted == [2]


def test_warm_up_is_asked_once_per_decode_phase() -> None:
    stepped = planner(capacity=2, warmup=Fixed(1))

    assert stepped.step(batch(0, 0)).warmup_bytes == 1
    assert stepped.step(batch(0, 2)).warmup_bytes == 0


def test_what_warm_up_brought_is_not_compulsory() -> None:
    stepped = planner(capacity=1, warmup=Fixed(1))
    assert stepped.step(batch(0, 0)).compulsory == 1

    assert stepped.step(batch(0, 1)).compulsory == 0


# -- parts that misbehave are caught


class Stubborn(LRU):
    """Never lets anything go."""

    def victims(self, needed_bytes: int, pinned: Collection[int]) -> list[int]:
        return []


class Careless(LRU):
    """Gives up what is in use."""

    def victims(self, needed_bytes: int, pinned: Collection[int]) -> list[int]:
        return sorted(pinned)[:needed_bytes]


class Confused(LRU):
    """Gives up what is not there."""

    def victims(self, needed_bytes: int, pinned: Collection[int]) -> list[int]:
        return [15]


class Twice(LRU):
    """Gives up one slice twice."""

    def victims(self, needed_bytes: int, pinned: Collection[int]) -> list[int]:
        return super().victims(needed_bytes, pinned) * 2


class Hasty(LRU):
    """Releases what was brought early for a layer to come."""

    def release(self, needed: Sequence[int], pinned: Collection[int]) -> list[int]:
        return sorted(pinned)


@pytest.mark.parametrize(
    ("eviction", "message"),
    [
        (
            Stubborn(),
            r"Stubborn evicts \[\], which leaves 1 bytes over the capacity, though others",
        ),
        (Careless(), r"Careless evicts \[4\], which are in use"),
        (Confused(), r"Confused evicts \[15\], some of which are not resident or named twice"),
        (Twice(), r"Twice evicts \[0, 0\], some of which are not resident or named twice"),
    ],
)
def test_an_eviction_policy_that_breaks_the_rules_is_caught(
    eviction: Eviction, message: str
) -> None:
    stepped = planner(capacity=1, eviction=(eviction,))
    stepped.step(batch(0, 0))
    with pytest.raises(RuntimeError, match=message):
        stepped.step(batch(1, 0))


def test_a_release_of_what_is_brought_early_is_caught() -> None:
    stepped = planner(capacity=2, eviction=(Hasty(),), prefetch=Wish([4]))
    stepped.step(batch(0, 0))
    with pytest.raises(RuntimeError, match=r"Hasty evicts \[4\], which are in use"):
        stepped.step(batch(2, 0))


class Forgetful(Miss):
    """Leaves out a missing slice."""

    def resolve(self, missing: list[int], batch: LayerBatch) -> Missed:
        return Missed(missing[1:])


class Doubling(Miss):
    """Fetches and skips the same slices."""

    def resolve(self, missing: list[int], batch: LayerBatch) -> Missed:
        return Missed(missing, skip=missing)


@pytest.mark.parametrize(("miss", "got"), [(Forgetful(), r"\[1\]"), (Doubling(), r"\[0, 1\]")])
def test_a_miss_policy_that_breaks_the_rules_is_caught(miss: Miss, got: str) -> None:
    message = rf"{type(miss).__name__} must put each of \[0, 1\] in one list, got fetch {got}"
    with pytest.raises(RuntimeError, match=message):
        planner(miss=miss).step(batch(0, 0, 1))


def test_a_warm_up_that_does_not_fit_is_caught() -> None:
    with pytest.raises(RuntimeError, match="Fixed wants 3 bytes resident, more than the capacity"):
        planner(capacity=2, warmup=Fixed(0, 1, 2)).step(batch(0, 0))
