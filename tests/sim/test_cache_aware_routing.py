"""Routing that prefers cached experts: by hand, against plain loops, and what must not change."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetier.sim.layout import Layout
from moetier.sim.policy.base import Context, Progress, Routing
from moetier.sim.policy.compose import compose
from moetier.sim.policy.routing.cache_prior import EVERY, GAIN, LARGEST, LARGEST_MOVE, CachePrior
from moetier.sim.policy.routing.cumsum import Cumsum
from moetier.sim.run import Setting, set_up
from moetier.sim.testing import Run, run, toy_header, toy_profile, toy_trace
from moetier.traces.batch import DECODE, PREFILL, LayerBatch
from moetier.traces.errors import InputError
from moetier.traces.gating import GateRule
from moetier.traces.geometry import load_geometry
from moetier.traces.schema import ScoreKind
from moetier.traces.synthetic import Synthetic

E, K = 6, 2
Values = npt.NDArray[np.float64]


def started(part: Any, cached: set[int], kind: ScoreKind = "logits", parts: int = 1) -> Any:
    """Return *part* with the first slices of the experts *cached* of layer 1 of two resident."""
    layout = Layout([[40] * parts] * 2, E)
    resident = {layout.slice_id(1, expert) for expert in cached}
    gate = GateRule(K, kind, normalised=True)
    part.start(Context(layout, 400, resident, np.random.default_rng(0), Progress(), gate=gate))
    return part


def asked(scores: Any, phase: int = DECODE, scale: float = 1.0, layer: int = 1) -> LayerBatch:
    """Return the batch a router makes of logits; its weights add up to *scale*."""
    scores = np.atleast_2d(np.array(scores, np.float32))
    ids, weights = GateRule(K, "logits", normalised=True).choose(scores)
    experts = ids.ravel().tolist()
    return LayerBatch(
        5, phase, layer, len(scores), 9, experts, weights.ravel() * np.float32(scale),
        scores=scores, recorded=[1] * len(experts),
    )  # fmt: skip


Z = [5.0, 4.0, 3.5, 3.0, 1.0, 0.0]  # range 5


@pytest.mark.parametrize(
    ("strength", "top", "cached", "experts"),
    [
        (0.11, 0, {2}, [0, 2]),  # 3.5 + .55 > 4
        (0.09, 0, {2}, [0, 1]),  # 3.5 + .45 < 4
        (0.11, 2, {2}, [0, 1]),  # the two likeliest get the head start too
        (0.11, 1, {2}, [0, 2]),
        (0.31, 0, {2, 3}, [2, 0]),  # 5.05, 5, 4.55, 4
        (9.0, 0, {4, 5}, [4, 5]),
        (9.0, 1, {4, 5}, [0, 4]),
        (9.0, 0, set(), [0, 1]),
    ],
)
def test_cached_experts_get_a_head_start(
    strength: float, top: int, cached: set[int], experts: list[int]
) -> None:
    part = started(CachePrior(strength, top), cached)

    assert part.route(asked(Z)).experts == experts


def test_the_mix_is_that_of_the_original_scores() -> None:
    given = asked(Z)
    found = started(CachePrior(9.0, 0), {2, 4}).route(given)
    new = np.exp([3.5, 1.0])

    assert found.experts == [2, 4]
    assert found.weights == pytest.approx(new / new.sum())
    assert found.scores is given.scores
    assert found.recorded is None  # it was about the experts that are gone
    assert given.experts == [0, 1]  # as the source made it


def test_weights_keep_the_models_own_scale() -> None:
    """Some models multiply by a factor that no score shows."""
    found = started(CachePrior(9.0, 0), {2, 4}).route(asked(Z, scale=2.5))

    assert found.weights is not None
    assert found.weights.sum() == pytest.approx(2.5)


def test_a_batch_without_weights_stays_without() -> None:
    batch = asked(Z)
    batch.weights = None

    assert started(CachePrior(9.0, 0), {2, 4}).route(batch).weights is None


@pytest.mark.parametrize(
    ("part", "cached"),
    [
        (CachePrior(0.0), {3, 4}),
        (CachePrior(0.5, top=E), {3, 4}),
        (CachePrior(0.5), set(range(E))),
        (CachePrior(0.01), {3, 4}),
        (CachePrior(9.0), {0, 1}),
        (Cumsum(0.0), {3, 4}),
        (Cumsum(0.6), {3, 4}),
        (Cumsum(1.0), {0, 1}),
        (Cumsum(1.0), set()),
    ],
)
def test_where_nothing_changes_the_batch_itself_comes_back(part: Any, cached: set[int]) -> None:
    batch = asked(Z)

    assert started(part, cached).route(batch) is batch


@pytest.mark.parametrize("part", [CachePrior(9.0, 0), Cumsum(1.0)])
def test_prefill_follows_the_router(part: Routing) -> None:
    started(part, {4, 5})
    prefill = asked(Z, PREFILL)

    assert part.route(prefill) is prefill


@pytest.mark.parametrize("part", [CachePrior(9.0, 0), Cumsum(1.0)])
def test_a_row_without_scores_is_refused(part: Routing) -> None:
    started(part, {4, 5})
    blind = asked(Z)
    blind.scores = None

    with pytest.raises(InputError, match=r"MoE layer \d+ of step \d+ has no router scores"):
        part.route(blind)


@pytest.mark.parametrize("part", [CachePrior(9.0, 0), Cumsum(1.0)])
def test_only_this_layers_first_slices_count_as_cached(part: Any) -> None:
    """Here experts have two slices; those of layer 0, and second ones, say nothing."""
    started(part, {4, 5}, parts=2)
    part.context.resident.update({1, 2, 3, 12 + 3, 12 + 5})

    assert part.route(asked(Z)).experts == [4, 5]


def test_a_tie_goes_to_the_routers_own_choice() -> None:
    """Its top-k may break ties otherwise than by id."""
    batch = asked([1.0] * E)
    batch.experts = [5, 3]

    assert started(CachePrior(0.5, 0), set()).route(batch) is batch
    assert started(Cumsum(0.1), set()).route(batch) is batch


def test_every_token_is_routed_by_itself() -> None:
    flat, steep = Z, [9.0, 8.0, 0.0, 0.0, 0.0, 0.0]
    batch = asked([flat, steep])
    found = started(CachePrior(0.3, 0), {2}).route(batch)  # D is the mean, 7

    assert found.experts == [2, 0, 0, 1]
    assert batch.weights is not None
    assert found.weights is not None
    assert found.weights[2:].tolist() == batch.weights[2:].tolist()


def test_a_token_keeps_the_number_of_its_experts() -> None:
    batch = asked([Z, Z])
    batch.experts, batch.tokens = [0, 0, 1], [0, 1, 1]
    batch.weights = np.array([1, 0.7, 0.3], np.float32)
    found = started(CachePrior(9.0, 0), {4, 5}).route(batch)

    assert (found.experts, found.tokens) == ([4, 4, 5], [0, 1, 1])


def test_the_range_is_a_running_mean_per_layer() -> None:
    part = started(CachePrior(0.2, 0, ema=0.75), {2})
    part.route(asked([8.0, 0, 0, 0, 0, 0]))
    part.route(asked([100.0, 0, 0, 0, 0, 0], layer=0))
    part.route(asked([100.0, 0, 0, 0, 0, 0], PREFILL))
    # D = .75 * 8 + .25 * 4 = 7: the head start is 1.4
    for gap, experts in ((1.39, [0, 2]), (1.41, [0, 1])):
        again = started(CachePrior(0.2, 0, ema=0.75), {2})
        again.route(asked([8.0, 0, 0, 0, 0, 0]))

        assert again.route(asked([4.0, 3.0, 3.0 - gap, 0, 0, 0])).experts == experts
    part.start(part.context)  # forgets: D = 4, the head start is .8
    assert part.route(asked([4.0, 3.0, 1.61, 0, 0, 0])).experts == [0, 1]


def test_probabilities_mean_what_their_logits_mean() -> None:
    """The softmax of the logits of the cases above, and the same decisions."""
    for strength, experts in ((0.11, [0, 2]), (0.09, [0, 1])):
        batch = asked(Z)
        shares = np.exp(np.array([Z]))
        batch.scores = (shares / shares.sum()).astype(np.float32)

        part = started(CachePrior(strength, 0), {2}, "probabilities")
        assert part.route(batch).experts == experts


def test_a_probability_that_vanished_is_no_infinite_range() -> None:
    batch = asked([[0.6, 0.3, 0.1, 0.0, 0.0, 0.0]])
    part = started(CachePrior(0.2, 0), {2}, "probabilities")

    assert part.route(batch).experts == [2, 0]  # range ln(.6 / 1e-9) = 20.2, the head start 4


def test_sigmoids_are_raised_as_they_are() -> None:
    batch = asked([[0.9, 0.8, 0.7, 0.1, 0.1, 0.1]])  # range .8

    assert started(CachePrior(0.13, 0), {2}, "sigmoid").route(batch).experts == [0, 2]
    assert started(CachePrior(0.12, 0), {2}, "sigmoid").route(batch) is batch


SHARES = np.log([0.4, 0.25, 0.2, 0.1, 0.04, 0.01])


@pytest.mark.parametrize(
    ("mass", "cached", "experts"),
    [
        (0.64, {2, 3}, [0, 1]),  # the first two reach .65
        (0.66, {2, 3}, [2, 0]),  # three are candidates
        (0.84, {2, 3}, [2, 0]),
        (0.86, {2, 3}, [2, 3]),
        (0.86, {4, 5}, [0, 1]),
        (0.98, {3, 4}, [3, 4]),
        (1.0, {4, 5}, [4, 5]),
        (0.86, {3}, [3, 0]),
        (0.1, {1}, [0, 1]),  # never fewer candidates than experts
    ],
)
def test_cumsum_prefers_cached_ones_among_the_likeliest(
    mass: float, cached: set[int], experts: list[int]
) -> None:
    batch = asked(SHARES)
    found = started(Cumsum(mass), cached).route(batch)

    assert sorted(found.experts) == sorted(experts)
    if found is not batch:
        assert found.experts == experts
        new = np.exp(SHARES)[experts]
        assert found.weights == pytest.approx(new / new.sum(), rel=1e-5)


def test_cumsum_counts_sigmoids_as_shares_of_their_sum() -> None:
    """Of 2.5 in all the first two have 1.7, or .68; what a bias made negative counts as nothing."""
    batch = asked([[0.9, 0.8, 0.7, 0.1, 0.0, -5.0]])

    assert started(Cumsum(0.67), {2, 3}, "sigmoid").route(batch) is batch
    assert started(Cumsum(0.69), {2, 3}, "sigmoid").route(batch).experts == [2, 0]


def plain_cache_prior(z: list[float], cached: set[int], strength: float, top: int) -> list[int]:
    likeliest = sorted(range(E), key=lambda e: -z[e])
    lifted = set(likeliest[:top]) | cached
    values = [v + (strength * (max(z) - min(z)) if e in lifted else 0) for e, v in enumerate(z)]
    return sorted(range(E), key=lambda e: -values[e])[:K]


def plain_cumsum(z: list[float], cached: set[int], mass: float) -> list[int]:
    shares = np.exp(z) / np.exp(z).sum()
    prefix: list[int] = []
    for e in sorted(range(E), key=lambda e: -z[e]):
        if len(prefix) < K or sum(shares[prefix]) < mass:
            prefix.append(e)
    return sorted(prefix, key=lambda e: (e not in cached, -z[e]))[:K]


LOGITS = st.permutations([0, 1, 2, 3, 5, 8]).map(lambda found: [v * 0.61 for v in found])
CACHED = st.sets(st.integers(0, E - 1))


@given(
    z=LOGITS, cached=CACHED, strength=st.sampled_from([0.07, 0.2, 0.6, 3]), top=st.integers(0, 3)
)
def test_cache_prior_decides_as_plain_loops_do(
    z: list[float], cached: set[int], strength: float, top: int
) -> None:
    found = started(CachePrior(strength, top), cached).route(asked(z))

    assert set(found.experts) == set(plain_cache_prior(z, cached, strength, top))
    assert found.weights.sum() == pytest.approx(1)


@given(z=LOGITS, cached=CACHED, mass=st.sampled_from([0.0, 0.5, 0.8, 0.95, 0.999]))
def test_cumsum_decides_as_plain_loops_do(z: list[float], cached: set[int], mass: float) -> None:
    found = started(Cumsum(mass), cached).route(asked(z))

    assert set(found.experts) == set(plain_cumsum(z, cached, mass))
    assert found.weights.sum() == pytest.approx(1)


@given(z=LOGITS, cached=CACHED, top=st.integers(0, K))
def test_a_prior_without_end_takes_cached_ones_and_the_top(
    z: list[float], cached: set[int], top: int
) -> None:
    found = set(started(CachePrior(1e6, top), cached).route(asked(z)).experts)
    wanted = cached | set(sorted(range(E), key=lambda e: -z[e])[:top])

    assert found <= wanted if len(wanted) >= K else wanted <= found
    if top == K:
        assert found == set(sorted(wanted, key=lambda e: -z[e])[:K])


TRACE = Synthetic(load_geometry("moe-tiny"), prompt=6, tokens=30, skew=1.0, seed=3, scores=True)
PROFILE = toy_profile()


def simulated(policy: Any, **more: Any) -> Run:
    return run(
        TRACE, PROFILE, policy, watch=False, capacity={"hbm": Fraction(3, 10)},
        tiers=["hbm", "dram"], **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    "routing",
    [
        {"kind": "cache-prior", "strength": 0},
        {"kind": "cache-prior", "strength": 5, "top": 32},
        {"kind": "cumsum", "mass": 0},
        {"kind": "cumsum", "mass": 1e-9},
    ],
    ids=str,
)
def test_without_effect_the_records_are_those_of_exact_routing(routing: Any) -> None:
    found, exact = simulated({"routing": routing}), simulated("on-demand")

    assert found.digest == exact.digest
    assert [p.batch.experts for p in found.plans] == [p.batch.experts for p in exact.plans]


@pytest.mark.parametrize(
    ("kind", "key", "values"),
    [("cache-prior", "strength", [0, 0.05, 0.2, 1]), ("cumsum", "mass", [0, 0.5, 0.8, 0.95])],
)
def test_the_stronger_the_fewer_misses(kind: str, key: str, values: list[float]) -> None:
    runs = [simulated({"routing": {"kind": kind, key: value}}) for value in values]
    rates = [found.metrics["miss_rate"] for found in runs]

    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == len(rates)
    assert [found.metrics["lossless"] for found in runs] == [True, False, False, False]
    assert [
        any(text.startswith("replayed lossy policy") for text in found.result.known_limitations)
        for found in runs
    ] == [False, True, True, True]


def test_a_miss_rate_is_approached_from_both_sides() -> None:
    """At 12 and at 30 % of look-ups, far from where the strengths they begin with lead."""
    for target, begin in ((0.12, 0.0), (0.3, 0.8)):
        routing = {"kind": "cache-prior", "strength": begin, "top": 0, "miss_rate": target}
        long = Synthetic(load_geometry("moe-tiny"), prompt=6, tokens=400, seed=3, scores=True)
        found = run(
            long, PROFILE, {"routing": routing}, watch=False, capacity={"hbm": Fraction(3, 10)},
            tiers=["hbm", "dram"], warmup_steps=100,
        )  # fmt: skip

        assert found.metrics["miss_rate"] == pytest.approx(target, rel=0.15)
        assert found.metrics["lossless"] is False


def controlled(rates: list[float], begin: float, after: int = 2) -> list[float]:
    """Return the strength in each step, whose look-ups miss at *rates*, of a target of 10 %."""
    part = started(CachePrior(begin, 0, miss_rate=0.1, after=after), set())
    progress, found = part.context.progress, []
    for rate in rates:
        part.route(asked(Z, layer=0))
        found.append(part.strength)
        progress.decode_steps += 1
        progress.lookups += 100
        progress.fetches += round(100 * rate)
        part.route(asked(Z, layer=1))
    return found


def test_the_strength_moves_every_few_steps_by_the_miss_rate_since() -> None:
    """The first two steps do not count."""
    rates = [1.0, 1.0, *[0.3] * EVERY, *[0.0] * EVERY, 0.5]
    up = 0.2 + GAIN * (0.3 / 0.1 - 1)
    expected = [*[0.2] * (2 + EVERY), *[up] * EVERY, up - GAIN]

    assert controlled(rates, 0.2) == pytest.approx(expected)


def test_the_strength_stays_within_bounds() -> None:
    high = controlled([1.0] * 200, 0.0, after=0)
    steps = np.diff(high)

    assert max(high) == LARGEST
    assert max(steps) == pytest.approx(LARGEST_MOVE)
    assert controlled([0.0] * 200, 0.1)[-1] == 0
    assert set(controlled([0.1] * 60, 0.1)) == {0.1}  # at the target it rests


@pytest.mark.parametrize("kind", ["cache-prior", "cumsum"])
def test_traces_without_scores_are_refused_by_name(kind: str) -> None:
    trace = toy_trace(toy_header(), [[[0]], [[1]]])
    name = type(compose(kind).routing).__name__

    with pytest.raises(InputError, match=rf"policy.routing: '{name}' reads router scores, which"):
        run(trace, toy_profile(), {"routing": kind})


@pytest.mark.parametrize("oracle", [{"eviction": "belady"}, {"prefetch": "oracle"}], ids=str)
@pytest.mark.parametrize(
    "seam", [{"routing": "cache-prior"}, {"routing": "cumsum"},
             {"precision": {"kind": "hobbit", "upgrade": True}}], ids=str,
)  # fmt: skip
def test_no_oracle_foresees_what_goes_by_the_cache(
    seam: dict[str, Any], oracle: dict[str, Any]
) -> None:
    with pytest.raises(InputError, match=r"goes by what is cached, so that no oracle can foresee"):
        simulated(seam | oracle)


@pytest.mark.parametrize(
    ("routing", "problem"),
    [
        ({"kind": "cache-prior", "strength": -1}, "parameter 'strength'"),
        ({"kind": "cache-prior", "strength": float("inf")}, "parameter 'strength'"),
        ({"kind": "cache-prior", "ema": 1.1}, "parameter 'ema'"),
        ({"kind": "cache-prior", "miss_rate": 0}, "miss_rate is 0"),
        ({"kind": "cache-prior", "miss_rate": "100 %"}, "miss_rate is 1.0; use a share between"),
        ({"kind": "cumsum", "mass": 1.5}, "parameter 'mass'"),
    ],
)
def test_impossible_parameters_are_named(routing: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        compose({"routing": routing})


def test_a_target_may_be_a_text() -> None:
    part = compose({"routing": {"kind": "cache-prior", "miss_rate": "5 %"}}).routing

    assert isinstance(part, CachePrior)
    assert part.miss_rate == 0.05
    assert part.counts_demand


def test_bit_slices_and_windows_go_with_it() -> None:
    """MSB slices are what counts as cached; the prior raises their hits, whatever else is on."""
    sliced = {"precision": {"kind": "bit-sliced", "theta": 0.3}, "eviction": "slice-aware"}
    prior = {"routing": {"kind": "cache-prior", "strength": 0.5}}
    rates = [simulated(sliced | more).metrics["miss_rate_msb"] for more in ({}, prior)]

    assert rates[1] < rates[0]


def test_every_score_kind_but_the_unknown_is_tried_here() -> None:
    assert set(get_args(ScoreKind)) == {"logits", "probabilities", "sigmoid", "none", "unknown"}
    header = toy_header().model_copy(update={"score_kind": "unknown"})
    trace = toy_trace(header, [[[0]]])
    with pytest.raises(InputError, match="reads router scores"):
        set_up(trace.header, Setting(PROFILE, "cumsum"), _extent(trace))


def _extent(trace: Any) -> Any:
    from moetier.sim.memory import extent_of

    return extent_of(trace)
