"""Experts in two copies: who is read high, low or not at all, by hand and against plain loops."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetier.sim.layout import Layout
from moetier.sim.policy.base import Context, ExpertFormat
from moetier.sim.policy.compose import compose
from moetier.sim.policy.precision.hobbit import Hobbit, unimportance
from moetier.sim.policy.precision.uniform import Uniform
from moetier.sim.policy.seams import SEAMS
from moetier.sim.testing import Run, run, toy_header, toy_profile, toy_trace
from moetier.traces.batch import DECODE, PREFILL, LayerBatch
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry, load_geometry
from moetier.traces.synthetic import Synthetic

E = 6


def started(part: Hobbit, resident: set[int] | None = None) -> Hobbit:
    layout = Layout([[40, 10]] * 2, E)
    part.start(Context(layout, 400, resident or set(), np.random.default_rng(0)))
    return part


def asked(*tokens: dict[int, float], phase: int = DECODE) -> LayerBatch:
    """Return a batch of layer 1; each token maps its experts to their gate weights."""
    experts = [e for token in tokens for e in token]
    weights = np.array([w for token in tokens for w in token.values()], np.float32)
    at = [t for t, token in enumerate(tokens) for _ in token]
    return LayerBatch(
        5, phase, 1, len(tokens), 9, experts, weights, tokens=at, recorded=list(range(len(at)))
    )


def decided(part: Hobbit, batch: LayerBatch) -> tuple[list[int], list[int], list[int] | None]:
    """Return the experts that are left, their slices within layer 1, and their levels."""
    kept = part.narrow(batch)
    first = part.context.layout.layer_slices
    return kept.experts, [s - first for s in part.needed(kept)], part.levels(kept, ())


def test_a_token_reads_high_then_low_then_nothing() -> None:
    """Before the four stand 0, .5, .8 and .95 of the weights."""
    batch = asked({4: 0.15, 2: 0.5, 0: 0.05, 1: 0.3})
    part = started(Hobbit())

    assert decided(part, batch) == ([4, 2, 1], [9, 4, 2], [1, 0, 0])
    kept = part.narrow(batch)
    assert kept.weights == pytest.approx([0.15, 0.5, 0.3])  # as they were
    assert (kept.tokens, kept.recorded) == ([0, 0, 0], [0, 1, 3])
    assert batch.experts == [4, 2, 0, 1]


@pytest.mark.parametrize(
    ("t1", "t2", "experts", "levels"),
    [
        (0.0, 0.0, [2], None),  # the first one always is at high precision
        (0.0, 1.0, [4, 2, 0, 1], [1, 0, 1, 1]),
        (0.49, 0.79, [2, 1], [0, 1]),
        (0.5, 0.8, [4, 2, 1], [1, 0, 0]),  # thresholds include what they name
        (1.0, 1.0, [4, 2, 0, 1], None),
    ],
)
def test_thresholds(t1: float, t2: float, experts: list[int], levels: list[int] | None) -> None:
    batch = asked({4: 0.15, 2: 0.5, 0: 0.05, 1: 0.3})
    kept, _, found = decided(started(Hobbit(t1, t2)), batch)

    assert (kept, found) == (experts, levels)


def test_unimportance_is_a_share_of_the_tokens_own_weights() -> None:
    batch = asked({1: 1.0, 2: 3.0}, {1: 0.1, 3: 0.1, 0: 0.2}, {5: 0.0})

    assert unimportance(batch) == pytest.approx([0.75, 0, 0.5, 0.75, 0, 0])


def test_a_batch_uses_one_copy_of_an_expert() -> None:
    """Expert 1 is wanted low by the first token and high by the second; 3 low by both."""
    batch = asked({0: 0.7, 1: 0.2, 3: 0.1}, {1: 0.8, 3: 0.2})

    experts, slices, levels = decided(started(Hobbit(0.6, 1.0)), batch)
    assert experts == [0, 1, 3, 1, 3]
    assert slices == [0, 2, 7, 2, 7]
    assert levels == [0, 0, 1, 0, 1]


def test_prefill_reads_everything_high() -> None:
    batch = asked({0: 0.9, 1: 0.06, 3: 0.04}, phase=PREFILL)
    part = started(Hobbit())

    assert part.narrow(batch) is batch
    assert part.needed(batch) == [12, 14, 18]
    assert part.levels(batch, ()) is None


@pytest.mark.parametrize(
    ("upgrade", "resident", "slices"),
    [
        (True, {12 + 2}, [0, 2]),
        (True, {12 + 3}, [0, 3]),  # the low copy
        (True, {2}, [0, 3]),  # of another layer
        (False, {12 + 2}, [0, 3]),
    ],
)
def test_a_high_copy_that_is_there_may_serve(
    upgrade: bool, resident: set[int], slices: list[int]
) -> None:
    part = started(Hobbit(upgrade=upgrade), resident)
    _, found, levels = decided(part, asked({0: 0.7, 1: 0.3}))

    assert found == slices
    assert levels == (None if slices == [0, 2] else [0, 1])


def test_what_was_not_narrowed_is_not_guessed() -> None:
    part = started(Hobbit())
    part.narrow(asked({0: 1.0}))

    with pytest.raises(RuntimeError, match="only after `narrow` has seen it"):
        part.needed(asked({0: 1.0}))


WEIGHTS = st.lists(st.integers(1, 60), min_size=1, max_size=E)


@given(tokens=st.lists(WEIGHTS, min_size=1, max_size=3), t1=st.floats(0, 1), t2=st.floats(0, 1))
def test_the_rule_as_plain_loops(tokens: list[list[int]], t1: float, t2: float) -> None:
    t1, t2 = sorted((t1, t2))
    batch = asked(*({e: float(w) for e, w in enumerate(token)} for token in tokens))
    wanted: dict[tuple[int, int], int] = {}
    for t, token in enumerate(tokens):
        before = 0
        for e in sorted(range(len(token)), key=lambda e: -token[e]):
            score = np.float32(before / sum(token))
            if score <= np.float32(t2):
                wanted[t, e] = 0 if score <= np.float32(t1) else 1
            before += token[e]
    high = {e for (_, e), level in wanted.items() if level == 0}
    part = started(Hobbit(t1, t2))
    kept = part.narrow(batch)

    assert list(zip(kept.token_ids(), kept.experts, strict=True)) == sorted(wanted)
    levels = part.levels(kept, ()) or [0] * len(kept.experts)
    assert levels == [0 if e in high else 1 for e in kept.experts]
    assert set(kept.token_ids()) == set(range(len(tokens)))
    assert part.needed(kept) == [
        12 + 2 * e + level for e, level in zip(kept.experts, levels, strict=True)
    ]


GEOMETRY = Geometry(
    name="toy", n_experts=4, top_k=1, moe_layers=[0, 1], n_layers=2, hidden=64, moe_intermediate=32
)


def test_the_copies_are_the_stored_expert_and_one_of_few_bits() -> None:
    """An expert has 6144 weights; four bits cost 4.625 with scales and zero-points, eight 8.75."""
    stored = [12288, 12288]

    assert Hobbit().layout(stored, GEOMETRY).nbytes[:2] == [12288, 3552]
    assert Hobbit(high=8).layout(stored, GEOMETRY).nbytes[:2] == [6720, 3552]
    assert Uniform(8).layout(stored, GEOMETRY).nbytes[0] == 6720
    assert not Hobbit().layout(stored, GEOMETRY).bit_sliced
    assert Hobbit().formats == (ExpertFormat(), ExpertFormat(4))
    assert Hobbit(high=8, low=2, group=16).formats == (
        ExpertFormat(8, group=16), ExpertFormat(2, group=16),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ({"t1": 0.9, "t2": 0.6}, "t1 is 0.9, above t2, 0.6; use t1 <= t2"),
        ({"t1": 1.5}, "parameter 't1'"),
        ({"low": 8, "high": 8}, "low is 8 bits, high 8; use fewer for low"),
        ({"low": 0}, "parameter 'low'"),
    ],
)
def test_impossible_parameters_are_named(how: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        compose({"precision": {"kind": "hobbit", **how}})


@pytest.mark.parametrize(
    ("part", "stored", "problem"),
    [
        (Hobbit(high=16), 12287, "codes of 16 bits take 12288 bytes, more than the 12287"),
        (Hobbit(), 3552, r"a low copy of \d+ bytes, with its scales, beside a high one of 3552"),
        (Hobbit(low=15), 12000, "beside a high one of 12000; use fewer bits for `low`"),
    ],
)
def test_copies_that_save_nothing_are_refused(part: Hobbit, stored: int, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        part.layout([stored] * 2, GEOMETRY)


TRACE = Synthetic(load_geometry("moe-tiny"), prompt=6, tokens=30, skew=1.0, seed=3)
PROFILE = toy_profile()


def simulated(policy: Any, share: Fraction = Fraction(3, 10)) -> Run:
    return run(TRACE, PROFILE, policy, watch=False, capacity={"hbm": share}, tiers=["hbm", "dram"])


def test_all_high_is_on_demand_to_the_byte() -> None:
    found = simulated({"precision": {"kind": "hobbit", "t1": 1, "t2": 1}})

    assert found.digest == simulated("on-demand").digest


def test_low_copies_move_fewer_bytes_for_more_misses() -> None:
    found, plain = simulated("hobbit").metrics, simulated("on-demand").metrics

    assert found["bytes_per_token"] < 0.8 * plain["bytes_per_token"]
    assert found["lossless"] is False
    assert found["miss_rate_lsb"] is None  # the copies are no bit slices


def test_serving_from_the_high_copy_saves_copies() -> None:
    upgraded = simulated({"precision": {"kind": "hobbit", "upgrade": True}}).metrics

    assert upgraded["misses"] < simulated("hobbit").metrics["misses"]


@pytest.mark.parametrize("eviction", SEAMS["eviction"].names())
@pytest.mark.parametrize("miss", ["fetch", "cpu", "skip"])
def test_it_goes_with_every_eviction_and_miss(eviction: str, miss: str) -> None:
    policy = {"preset": "hobbit", "eviction": eviction, "miss": miss}
    if compose(policy).eviction[0].needs_bit_slices:
        with pytest.raises(InputError, match="about MSB and LSB slices, and experts have none"):
            simulated(policy)
        return
    found = simulated(policy)

    assert found.metrics["tokens"] == 30
    assert all(len({s // 2 for s in p.needed}) == len(p.needed) for p in found.plans)


def test_belady_misses_least() -> None:
    """It foresees what is left out and which copy is read."""
    rates = {
        name: simulated({"preset": "hobbit", "eviction": name}).metrics["misses"]
        for name in ("belady", "lru", "fifo", "lfu")
    }

    assert min(rates, key=rates.__getitem__) == "belady"
    assert rates["belady"] < 0.9 * rates["lru"]


def test_doing_without_half_of_an_expert_is_refused() -> None:
    with pytest.raises(InputError, match=r"policy.miss: 'Degrade' is about MSB and LSB slices"):
        simulated({"precision": "hobbit", "miss": "degrade"})


def test_a_source_without_weights_is_refused_by_name() -> None:
    header = toy_header(hidden=64, moe_intermediate=32, expert_bytes=12288)
    trace = toy_trace(header.model_copy(update={"unknown": ["weights"]}), [[[0]], [[1]]])

    with pytest.raises(InputError, match=r"policy.precision: 'Hobbit' reads gate weights, which"):
        run(trace, toy_profile(), "hobbit")
