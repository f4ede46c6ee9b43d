"""Bit slices and the parts about them: what is asked for, kept and done without, by hand.

With four experts a layer, expert e of layer l has the slices 8 l + 2 e (MSB) and the one after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetier.sim.layout import Layout
from moetier.sim.plan import LayerPlan
from moetier.sim.planner import Planner
from moetier.sim.policy.base import Context, ExpertFormat, Progress
from moetier.sim.policy.compose import Policy, compose
from moetier.sim.policy.eviction.slice_aware import SliceAware
from moetier.sim.policy.miss.degrade import Degrade
from moetier.sim.policy.precision.bit_sliced import BitSliced
from moetier.sim.policy.precision.uniform import Uniform
from moetier.sim.policy.warmup.pcw import PredictiveCacheWarmup
from moetier.sim.policy.whole import absent
from moetier.sim.testing import Run, run, toy_header, toy_profile, toy_trace
from moetier.traces.batch import DECODE, PREFILL, LayerBatch
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry, load_geometry
from moetier.traces.synthetic import Synthetic

E, MSB_BYTES, LSB_BYTES = 4, 3, 2
LAYOUT = Layout([[MSB_BYTES, LSB_BYTES]] * 2, E, bit_sliced=True)
WHOLE = Layout([[5]] * 2, E)


def context(resident: set[int] | None = None, **more: Any) -> Context:
    how: dict[str, Any] = {"layout": LAYOUT, "capacity": 20, "resident": resident or set()}
    how |= more
    return Context(rng=np.random.default_rng(0), **how)


def asked(*tokens: dict[int, float], layer: int = 0, **more: Any) -> LayerBatch:
    """Return a batch; each token maps its experts to their gate weights."""
    how: dict[str, Any] = {"step": 0, "phase": DECODE} | more
    experts = [e for token in tokens for e in token]
    weights = np.array([w for token in tokens for w in token.values()], np.float32)
    at = [t for t, token in enumerate(tokens) for _ in token]
    return LayerBatch(
        layer=layer, n_tokens=len(tokens), context=9, experts=experts, weights=weights, tokens=at,
        **how,
    )  # fmt: skip


def planner(capacity: int = 1000, **parts: Any) -> Planner:
    """Return a planner of bit slices; *parts* are seams."""
    spec = {"precision": {"kind": "bit-sliced", "theta": 0.5}} | parts
    return Planner(compose(spec, ["hbm"]), LAYOUT, [capacity])


# -- precision: bit-sliced


def started(theta: float = 0.1) -> BitSliced:
    part = BitSliced(theta=theta)
    part.start(context())
    return part


def test_critical_experts_ask_for_both_slices_in_slot_order() -> None:
    batch = asked({2: 0.5, 0: 0.09, 3: 0.2}, layer=1)

    assert started().needed(batch) == [8 + 4, 8 + 5, 8 + 0, 8 + 6, 8 + 7]


def test_every_token_of_a_batch_asks_for_itself() -> None:
    """Expert 2 is critical to the second token only; the planner looks each slice up once."""
    batch = asked({0: 0.9, 2: 0.05}, {2: 0.6, 0: 0.05})

    assert started().needed(batch) == [0, 1, 4, 4, 5, 0]
    plan = planner(precision={"kind": "bit-sliced", "theta": 0.1}).step(batch)
    assert plan.needed == plan.fetch == [0, 1, 4, 5]


def test_the_last_use_of_a_batch_is_the_youngest() -> None:
    """The order of use is 1, 4, 5, 0: slice 0 was used again after 5, and 1 is the oldest."""
    stepped = planner(10, precision={"kind": "bit-sliced", "theta": 0.1})
    stepped.step(asked({0: 0.9, 2: 0.05}, {2: 0.6, 0: 0.05}))

    assert stepped.step(asked({3: 0.01})).evicted == [1, 4]


@pytest.mark.parametrize("theta", [0.1, 0.3, 0.7])
def test_a_weight_that_is_the_threshold_is_critical(theta: float) -> None:
    """As float32, which weights are: 0.1 and 0.7 are no float32, and lie on either side."""
    just = np.float32(theta)
    below = np.nextafter(just, np.float32(0))
    part = started(theta)

    assert part.needed(asked({1: float(just)})) == [2, 3]
    assert part.needed(asked({1: float(below)})) == [2]
    assert part.levels(asked({1: float(just)}), ()) is None
    assert part.levels(asked({1: float(below)}), ()) == [1]


def test_extreme_thresholds_ask_for_all_or_for_no_lsb_slices() -> None:
    batch = asked({0: 1.0, 1: 0.0})

    assert started(0).needed(batch) == [0, 1, 2, 3]
    assert started(0).levels(batch, ()) is None
    assert started(1.01).needed(batch) == [0, 2]
    assert started(1.01).levels(batch, ()) == [1, 1]


def test_an_expert_is_computed_high_for_who_needs_it_and_has_it() -> None:
    batch = asked({0: 0.9, 2: 0.05}, {2: 0.6, 0: 0.2}, layer=1)
    part = started()

    assert part.levels(batch, ()) == [0, 1, 0, 0]
    assert part.levels(batch, [8 + 1]) == [1, 1, 0, 1]
    assert part.levels(batch, [8 + 5, 8 + 1]) == [1, 1, 1, 1]


def test_without_gate_weights_nobody_knows_what_is_critical() -> None:
    batch = asked({0: 0.9})
    batch.weights = None

    with pytest.raises(InputError, match=r"MoE layer 0 of step 0 has no gate weights"):
        started().needed(batch)


GEOMETRY = Geometry(
    name="toy", n_experts=4, top_k=1, moe_layers=[0, 1], n_layers=2, hidden=64, moe_intermediate=32
)
STORED = [12288, 12288]  # two bytes a weight


@pytest.mark.parametrize(
    ("bits", "group", "sizes"),
    [
        # 6144 weights, 192 groups of 32: codes + zero-points + scales of 16 bits, in the MSB slice
        ((8, 4), 32, [3072 + 96 + 384, 3072 + 96]),
        ((6, 3), 32, [2304 + 72 + 384, 2304 + 72]),
        ((4, 1), 16, [768 + 48 + 768, 2304 + 144]),
    ],
)
def test_the_bytes_of_slices(bits: tuple[int, int], group: int, sizes: list[int]) -> None:
    layout = BitSliced(bits, group=group).layout(STORED, GEOMETRY)

    assert layout.nbytes == sizes * 8
    assert layout.bit_sliced
    whole = Uniform(bits[0], group=group).layout(STORED, GEOMETRY)
    assert sum(sizes) == whole.nbytes[0]  # bits are parted, none is added


def test_the_formats_are_all_bits_and_the_highest_of_them() -> None:
    assert BitSliced((6, 3), group=16).formats == (
        ExpertFormat(6, group=16), ExpertFormat(3, inside=6, group=16),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("part", "stored", "problem"),
    [
        (BitSliced((9, 4)), 12288, "bit slices of 9/4 bits are out of range"),
        (BitSliced((4, 4)), 12288, "bit slices of 4/4 bits are out of range; use 1 <= low < high"),
        (BitSliced((8, 4)), 6143, "codes of 8 bits take 6144 bytes, more than the 6143 of the"),
        (BitSliced(group=48), 12288, "rows of 64 weights have no whole number of groups of 48"),
    ],
)
def test_impossible_slices_are_refused(part: BitSliced, stored: int, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        part.layout([stored] * 2, GEOMETRY)


HEADER = toy_header(12288, layers=2, hidden=64, moe_intermediate=32)


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        ({"eviction": "slice-aware"}, r"policy\.eviction: 'SliceAware' is about MSB and LSB slice"),
        ({"miss": "degrade"}, r"policy\.miss: 'Degrade' is about MSB and LSB slices, and experts"),
        ({"miss": "degrade", "precision": "hobbit"}, r"policy\.miss: 'Degrade' .* `precision: bit"),
        ({"precision": {"kind": "bit-sliced", "bits": [8, 0]}}, r"parameter 'bits\.1'"),
        ({"precision": "bit-sliced", "miss": {"kind": "degrade", "per": "token"}}, "'per'"),
        (
            {"precision": "bit-sliced", "miss": {"kind": "degrade", "miss_rate": 1.5}},
            r'miss_rate is 1\.5; use 0 to 1, or a text such as "5 %"',
        ),
    ],
)
def test_parts_without_bit_slices_are_refused_by_name(policy: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        run(toy_trace(HEADER, [[[0], [1]]]), toy_profile(), policy)


def test_a_source_that_has_no_weights_is_refused_by_name() -> None:
    header = HEADER.model_copy(update={"unknown": ["weights"]})

    with pytest.raises(InputError, match=r"policy\.precision: 'BitSliced' reads gate weights"):
        run(toy_trace(header, [[[0], [1]]]), toy_profile(), {"precision": "bit-sliced"})


def test_a_trace_without_weights_is_refused_where_it_is_read() -> None:
    with pytest.raises(InputError, match=r"MoE layer 0 of step 0 has no gate weights.*every row"):
        run(toy_trace(HEADER, [[[0], [1]]]), toy_profile(), {"precision": "bit-sliced"})


# -- eviction: slice-aware


def cache(*slices: int, resident: set[int] | None = None, keep_lsb: bool = True) -> SliceAware:
    """Return the part after *slices* were inserted in that order."""
    part = SliceAware(keep_lsb)
    part.start(context(resident))
    part.insert(slices)
    return part


def test_lsb_slices_go_first_then_msb_slices_each_by_last_use() -> None:
    part = cache(0, 1, 2, 3, 4, 5)
    part.touch([3, 0, 1])

    assert part.victims(1, ()) == [5]
    assert part.victims(2 + 2 + 1, ()) == [3, 1, 2]
    assert part.victims(100, ()) == [4, 0]
    assert part.victims(1, ()) == []


def test_no_more_than_needed_goes() -> None:
    assert cache(0, 1, 2, 3).victims(4, ()) == [1, 3]
    assert cache(0, 1, 2, 3).victims(5, ()) == [1, 3, 0]


def test_pinned_slices_stay_and_keep_their_place() -> None:
    part = cache(0, 1, 2, 3, 4, 5)

    assert part.victims(7, {1, 0}) == [3, 5, 2]
    assert part.victims(100, {0}) == [1, 4]
    assert part.victims(100, ()) == [0]


def test_what_left_for_another_reason_is_forgotten() -> None:
    part = cache(0, 1, 2, 3)
    part.forget([1, 0])

    assert part.victims(100, ()) == [3, 2]


def test_lsb_slices_are_let_go_once_used_unless_kept() -> None:
    needed, there = [0, 1, 2, 3, 5], {0, 1, 2, 3, 7}
    part = cache(0, 1, 2, 3, 7, resident=there, keep_lsb=False)

    assert part.release(needed, {3}) == [1]  # 3 is pinned, 5 is not there, 7 was not used
    assert part.victims(100, ()) == [3, 7, 0, 2]
    assert cache(0, 1, 2, 3, 7, resident=there).release(needed, ()) == []


def test_the_planner_lets_lsb_slices_go_after_their_batch() -> None:
    stepped = planner(eviction={"kind": "slice-aware", "keep_lsb": False})
    plans = [stepped.step(asked({1: 0.6, 2: 0.4}, step=n)) for n in range(2)]

    assert [plan.fetch for plan in plans] == [[2, 3, 4], [3]]
    assert [plan.evicted for plan in plans] == [[3], [3]]
    assert [plan.resident for plan in plans] == [6, 6]


def test_a_slice_in_use_outlives_older_msb_slices() -> None:
    """Room for 8 bytes: the LSB slice in use stays, so the MSB slice of before goes."""
    stepped = planner(8, eviction="slice-aware")
    stepped.step(asked({0: 0.6, 1: 0.4}))

    plan = stepped.step(asked({2: 1.0}))
    assert (plan.fetch, plan.evicted) == ([4, 5], [1, 0])


# -- warm-up: pcw


def warmed(*batches: LayerBatch, fill: bool = True, **more: Any) -> PredictiveCacheWarmup:
    part = PredictiveCacheWarmup(fill)
    part.start(context(**more))
    sliced = started(0.5)
    for batch in batches:
        part.observe(batch, list(dict.fromkeys(sliced.needed(batch))))
    return part


PROMPT = (
    asked({0: 0.6, 1: 0.4}, {1: 0.9, 3: 0.1}, {1: 0.5, 0: 0.5}, phase=PREFILL),
    asked({2: 0.9, 3: 0.1}, {2: 0.2, 0: 0.8}, {2: 0.3, 0: 0.7}, layer=1, phase=PREFILL),
)
# tokens: expert 1 of layer 0 and 2 of layer 1 three; 0 and 0 two; 3 and 3 one


def test_the_hottest_goes_last_and_lsb_slices_first() -> None:
    everything = warmed(*PROMPT, capacity=1000).decode_begins()

    msb_hottest_first = [2, 12, 0, 8, 6, 14]
    lsb_hottest_first = [3, 13, 1, 9]
    assert everything == [*lsb_hottest_first[::-1], *msb_hottest_first[::-1]]


def test_cold_experts_find_no_room() -> None:
    """Six MSB slices are 18 bytes, which leaves room for one LSB slice, of the hottest."""
    assert warmed(*PROMPT, capacity=20).decode_begins() == [3, 14, 6, 8, 0, 12, 2]
    assert warmed(*PROMPT, capacity=11).decode_begins() == [3, 0, 12, 2]  # 9, and 2 are left
    assert warmed(*PROMPT, capacity=10).decode_begins() == [0, 12, 2]
    assert warmed(*PROMPT, capacity=2).decode_begins() == [3]


def test_a_tokens_use_counts_whatever_its_weight() -> None:
    """Expert 3 has two tokens at little weight, expert 0 one at all of it."""
    part = warmed(asked({3: 0.1}, {0: 1.0}, {3: 0.1}, phase=PREFILL), capacity=6)

    assert part.decode_begins() == [0, 6]


def test_unfilled_only_what_is_there_is_put_in_order() -> None:
    there = {0, 1, 2, 5, 8}
    part = warmed(*PROMPT, fill=False, resident=there, capacity=1000)

    assert part.decode_begins() == [5, 1, 8, 0, 2]  # 5 was brought early, and no token used it


def test_filled_what_is_there_and_was_not_used_stays_if_there_is_room() -> None:
    assert warmed(resident={4, 5, 6}, capacity=8).decode_begins() == [5, 6, 4]


def test_every_prefill_is_counted_by_itself() -> None:
    part = warmed(*PROMPT, capacity=1000)
    part.decode_begins()

    assert part.decode_begins() == []
    part.observe(asked({3: 1.0}, phase=PREFILL), [6, 7])
    assert part.decode_begins() == [7, 6]


def test_whole_experts_are_ordered_by_count_alone() -> None:
    part = PredictiveCacheWarmup()
    part.start(context(layout=WHOLE, capacity=10))
    part.observe(asked({0: 1.0, 3: 0.1}, {3: 1.0, 1: 1.0}, {1: 1.0}, phase=PREFILL), [0, 3, 1])

    assert part.decode_begins() == [3, 1]


def test_decode_begins_with_what_prefill_used_most() -> None:
    """Room for four MSB slices: prefill ends with the last layer's; the first layer's come back."""
    stepped = planner(12, eviction="slice-aware", warmup="pcw")
    for batch in PROMPT:
        stepped.step(batch)
    plan = stepped.step(asked({1: 0.1, 0: 0.1}, step=1))

    assert plan.missing == []
    assert stepped.caches[0].resident == {2, 12, 0, 8}
    assert plan.warmup_bytes > 0
    assert stepped.caches[0].eviction.victims(3, {2, 0}) == [8]  # colder than 12


# -- miss: degrade


def constrained(
    counted: tuple[int, int, int, int], *, steps: int = 11, **more: Any
) -> tuple[Degrade, Progress]:
    """Return the part after *steps* decode steps had looked up and fetched what is *counted*."""
    part = Degrade(**more)
    lookups, lookup_bytes, fetches, fetch_bytes = counted
    progress = Progress(
        decode_steps=steps, lookups=lookups, lookup_bytes=lookup_bytes, fetches=fetches,
        fetch_bytes=fetch_bytes,
    )  # fmt: skip
    part.start(context(progress=progress))
    return part, progress


MISSING = [0, 1, 3, 4, 5]


def test_without_a_rate_lsb_slices_are_done_without_and_msb_slices_never() -> None:
    part = Degrade()
    part.start(context())

    found = part.resolve(MISSING, asked({0: 1.0}))
    assert (found.fetch, found.degrade, found.cpu, found.skip) == ([0, 4], [1, 3, 5], (), ())


def test_prefill_fetches_everything() -> None:
    for part in (Degrade(), Degrade("0 %", after=0)):
        part.start(context())
        found = part.resolve(MISSING, asked({0: 1.0}, phase=PREFILL))
        assert (found.fetch, found.degrade) == (MISSING, ())


def test_the_first_steps_fetch_everything() -> None:
    for steps, expected in ((1, ()), (10, ()), (11, [1, 3, 5])):
        part, _ = constrained((100, 0, 0, 0), steps=steps, miss_rate="0 %")
        assert part.resolve(MISSING, asked({0: 1.0})).degrade == expected


@pytest.mark.parametrize(
    ("fetches", "fetch"),
    [(0, [0, 4, 1, 3, 5]), (1, [0, 4, 1, 3]), (2, [0, 4, 1]), (3, [0, 4]), (9, [0, 4])],
)
def test_lsb_slices_come_as_far_as_the_rate_allows(fetches: int, fetch: list[int]) -> None:
    """Five of a hundred look-ups may be fetched; the MSB slices come first out of that."""
    part, _ = constrained((100, 10_000, fetches, 0), miss_rate=0.05)

    found = part.resolve(MISSING, asked({0: 1.0}))
    assert found.fetch == fetch
    assert sorted([*found.fetch, *found.degrade]) == MISSING


def test_bytes_are_counted_by_their_own_rate() -> None:
    """Of 5 % of 240 bytes, 12, two MSB slices take 6 and each LSB slice 2."""
    part, progress = constrained((1, 240, 0, 0), miss_rate="5 %", per="byte")
    assert part.resolve(MISSING, asked({0: 1.0})).degrade == []

    progress.fetch_bytes = 1
    assert part.resolve(MISSING, asked({0: 1.0})).degrade == [5]
    progress.lookup_bytes = 239
    progress.fetch_bytes = 0
    assert part.resolve(MISSING, asked({0: 1.0})).degrade == [5]


def test_what_the_first_steps_did_does_not_count() -> None:
    part, progress = constrained((150, 0, 50, 0), miss_rate="5 %")
    assert part.resolve(MISSING, asked({0: 1.0})).degrade == [1, 3, 5]

    progress.uncounted = 50, 0, 48, 0  # leaves 2 fetches of 100 look-ups
    assert part.resolve(MISSING, asked({0: 1.0})).degrade == [3, 5]

    part, progress = constrained((0, 1000, 0, 100), miss_rate="5 %", per="byte")
    progress.uncounted = 0, 600, 0, 90  # leaves 10 of 400 bytes, and so room for 10
    assert part.resolve(MISSING, asked({0: 1.0})).degrade == [5]


def test_a_rate_is_taken_exactly() -> None:
    """As a binary fraction 0.29 is a little less than 29 of 100, and would leave room for 28."""
    for rate in (0.29, "29 %"):
        assert Degrade(rate).miss_rate == Fraction(29, 100)
    part, _ = constrained((100, 0, 27, 0), miss_rate=0.29)
    assert part.resolve([1, 3, 5], asked({0: 1.0})).degrade == [5]


def plans(stepped: Planner, batches: list[LayerBatch]) -> Iterator[LayerPlan]:
    return (stepped.step(batch) for batch in batches)


def decoded(draw: st.DrawFn) -> list[LayerBatch]:
    """Return decode steps of one to three tokens over two layers."""
    token = st.dictionaries(
        st.integers(0, E - 1), st.sampled_from([0.1, 0.5, 0.9]), min_size=1, max_size=2
    )
    tokens = draw(st.lists(st.tuples(token, token), min_size=1, max_size=25))
    return [asked(t[n], layer=n, step=s) for s, t in enumerate(tokens) for n in (0, 1)]


@given(
    st.composite(decoded)(),
    st.sampled_from([0, 1, 3]),
    st.sampled_from(["0 %", "5 %", "30 %", "60 %", "100 %"]),
    st.sampled_from(["lookup", "byte"]),
    st.sampled_from([5, 8, 13, 40]),
    st.sampled_from(["lru", "slice-aware", {"kind": "slice-aware", "keep_lsb": False}]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_rate_is_kept_but_for_msb_slices(
    batches: list[LayerBatch], after: int, rate: str, per: str, capacity: int, eviction: Any
) -> None:
    """Where an LSB slice is fetched, all that is fetched is within the share.

    Where one is done without, fetching it too would not have been.
    """
    miss = {"kind": "degrade", "miss_rate": rate, "after": after, "per": per}
    stepped = planner(capacity, eviction=eviction, miss=miss)
    share = Fraction(int(rate[:-2]), 100)
    size = len if per == "lookup" else LAYOUT.size
    lsb = 1 if per == "lookup" else LSB_BYTES
    asked_for = fetched = 0
    for plan in plans(stepped, batches):
        assert all(s & 1 for s in plan.degrade)
        assert {s for s in plan.missing if not s & 1} <= set(plan.fetch)
        if plan.batch.step < after:
            assert not plan.degrade
            continue
        asked_for += size(plan.needed)
        fetched += size(plan.fetch)
        if any(s & 1 for s in plan.fetch):
            assert fetched <= share * asked_for
        if plan.degrade:
            assert fetched + lsb > share * asked_for


def test_a_slice_done_without_is_a_miss_that_is_not_fetched_and_compulsory_once() -> None:
    stepped = planner(miss="degrade", eviction="slice-aware")
    first, second = plans(stepped, [asked({1: 1.0}, step=n) for n in range(2)])

    assert (first.missing, first.fetch, first.degrade) == ([2, 3], [2], [3])
    assert (second.missing, second.fetch, second.degrade) == ([3], [], [3])
    assert (first.compulsory, second.compulsory) == (2, 0)
    assert (first.resident, second.resident) == (3, 3)


# -- what is missing of an expert that is there in part


def test_absent_is_whose_every_part_is_missing() -> None:
    assert absent(context({2, 7, 9}), [0, 1, 3, 4, 6, 8]) == [0, 1, 4]
    assert absent(context(), [5]) == [5]
    assert absent(context({1}, layout=WHOLE), [0, 2]) == [0, 2]


@pytest.mark.parametrize(("miss", "away"), [("cpu", "cpu"), ("skip", "skip")])
def test_no_expert_is_half_computed(miss: str, away: str) -> None:
    """Expert 0 is there but for its LSB slice, which is fetched; expert 1 is not there at all."""
    stepped = planner(miss=miss)
    stepped.step(asked({0: 0.1}, phase=PREFILL))
    if miss == "cpu":
        stepped.caches[0].insert([0])
    plan = stepped.step(asked({0: 0.9, 1: 0.8}, step=1))

    assert plan.fetch == [1]
    assert getattr(plan, away) == [2, 3]


# -- a whole run


TRACE = Synthetic(load_geometry("moe-tiny"), prompt=6, tokens=30, skew=1.0, seed=3)


def simulated(policy: dict[str, Any]) -> Run:
    sliced = {"precision": {"kind": "bit-sliced", "theta": 0.3}}
    room = {"hbm": Fraction(3, 20)}  # of bfloat16 experts: a quarter of the slices
    return run(TRACE, toy_profile(), sliced | policy, watch=False, capacity=room)


def test_slices_are_reported_apart() -> None:
    seen = simulated({"eviction": "slice-aware"})
    found = seen.metrics

    assert found["lossless"] is False
    assert 0 < found["miss_rate_msb"] < found["miss_rate"] < found["miss_rate_lsb"]
    assert found["compulsory_misses"] == len({s for plan in seen.plans for s in plan.needed})


def test_doing_without_saves_bytes_and_is_counted() -> None:
    fetching, held, without = (
        simulated({"eviction": "slice-aware", "miss": miss}).metrics
        for miss in ("fetch", {"kind": "degrade", "miss_rate": "30 %"}, "degrade")
    )

    assert fetching["degraded_share"] == 0
    assert without["degraded_share"] > 0
    assert without["byte_fetch_rate"] < held["byte_fetch_rate"] < fetching["byte_fetch_rate"]
    assert without["weight_read_share"] < fetching["weight_read_share"] == 1


def test_there_is_no_cliff_where_slices_are_not_asked_for() -> None:
    """Room for less than a token's experts, and for more than their MSB slices."""
    sliced = {"kind": "bit-sliced", "theta": 2}
    local = Synthetic(load_geometry("moe-tiny"), tokens=30, skew=1.0, reuse=0.9, seed=3)
    token = 8 * 4 * sum(BitSliced().layout([98304] * 8, local.geometry).nbytes[:2])
    seen = run(local, toy_profile(), {"precision": sliced}, capacity={"hbm": token * 7 // 10})

    assert seen.metrics["hit_rate_decode"] > 0
    assert not any("cliff" in line for line in seen.result.warnings)


def test_the_preset_is_made_of_these() -> None:
    policy: Policy = compose("slicemoe", ["hbm"])

    assert isinstance(policy.precision, BitSliced)
    assert (policy.precision.bits, policy.precision.theta) == ((6, 3), float(np.float32(0.1)))
    assert isinstance(policy.eviction[0], SliceAware)
    assert isinstance(policy.warmup, PredictiveCacheWarmup)
    assert isinstance(policy.miss, Degrade)
    assert policy.precision.alters_output
    assert policy.miss.alters_output
