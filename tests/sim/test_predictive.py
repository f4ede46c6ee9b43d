"""This module tests what policies do with predicted scores, by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetier.sim.layout import Layout
from moetier.sim.policy.base import Context, Progress
from moetier.sim.policy.prefetch.predicted import Predicted, ranked
from moetier.sim.policy.prefetch.window_aware import WindowAware
from moetier.sim.policy.routing.speculative import Speculative
from moetier.traces.batch import DECODE, PREFILL, Floats, LayerBatch
from moetier.traces.errors import InputError
from moetier.traces.gating import GateRule

LAYOUT = Layout([[40]] * 3, 4)  # three layers of four experts, 40 bytes each
GATE = GateRule(top_k=2, score_kind="logits", normalised=True)


@dataclass
class Estimates:
    """A window of *window* ns per horizon, and one byte per ns on the link."""

    window: int

    def window_ns(self, batch: LayerBatch, needed: object, horizon: int) -> int:
        """Grow with the horizon."""
        return self.window * horizon

    def copy_ns(self, nbytes: int) -> int:
        """Take a nanosecond a byte."""
        return nbytes


def context(resident: set[int] | None = None, window: int = 100, ahead: int = 0) -> Context:
    return Context(
        LAYOUT,
        capacity=400,
        resident=resident or set(),
        rng=np.random.default_rng(0),
        progress=Progress(ahead_bytes=ahead),
        gate=GATE,
        estimates=Estimates(window),
    )


def logits(*shares: list[float]) -> Floats:
    return np.log(np.array(shares, np.float32))


def batch(layer: int = 0, predicted: dict[int, Floats] | None = None, **more: int) -> LayerBatch:
    n = 1 if not predicted else len(next(iter(predicted.values())))
    return LayerBatch(
        step=more.get("step", 5),
        phase=more.get("phase", DECODE),
        layer=layer,
        n_tokens=n,
        context=9,
        experts=[0, 1] * n,
        weights=np.array([0.5, 0.5] * n, np.float32),
        predicted=predicted or {},
    )


SCORES = logits([0.1, 0.5, 0.1, 0.3])


def test_one_token_brings_its_predicted_top_k_likeliest_first() -> None:
    assert list(ranked(context(), batch(predicted={1: SCORES}), 1)) == [4 + 1, 4 + 3]


def test_several_tokens_are_ranked_by_their_summed_probability() -> None:
    two = logits([0.1, 0.5, 0.1, 0.3], [0.6, 0.05, 0.3, 0.05])
    found = list(ranked(context(), batch(predicted={1: two}), 1))

    assert found == [4 + 0, 4 + 1, 4 + 2, 4 + 3]  # .70, .55, .40, .35, all in some top-2


def test_a_budget_takes_the_likeliest_whoever_wants_them() -> None:
    assert list(ranked(context(), batch(predicted={1: SCORES}), 1, 1)) == [5]
    assert list(ranked(context(), batch(predicted={1: SCORES}), 1, 3)) == [5, 7, 4]


# Few values, so that most are tied; the odd ones are what a predictor may say of an expert.
SHARES = st.sampled_from([-np.inf, -1.0, -0.0, 0.0, 0.25, 0.5, 1.0, np.inf])


@given(
    shares=st.lists(SHARES | st.just(np.nan) | st.floats(width=32), max_size=40)
    | st.lists(SHARES, min_size=17, max_size=40),  # more than are looked for one by one
    wanted=st.none() | st.integers(0, 40),
    parts=st.integers(1, 3),
    several=st.booleans(),
)
def test_the_ranking_is_that_of_a_stable_sort(
    shares: list[float], wanted: int | None, parts: int, several: bool
) -> None:
    """Ties go to the lower index, NaN comes last, however many are asked for."""
    if not shares:
        return
    scores = np.array([shares], np.float32)
    layout = Layout([[40] * parts] * 2, len(shares))
    rule = GateRule(top_k=1, score_kind="logits", normalised=True)
    where = replace(context(), layout=layout, gate=rule)
    with np.errstate(all="ignore"):
        if several:  # summed probabilities of two tokens
            scores = np.concatenate([scores, scores[:, ::-1]])
            key = rule.probabilities(scores).sum(axis=0)
        else:
            key = scores[0]
        expected = (-key).argsort(kind="stable").tolist()
        before = scores.copy()
        found = list(ranked(where, batch(predicted={1: scores}), 1, wanted or None))

    first = len(shares) * parts
    assert found == [first + at * parts for at in expected][: wanted or None]
    np.testing.assert_array_equal(scores, before)  # the predictor's array is its own


def test_beyond_the_last_layer_nothing_is_brought() -> None:
    part = Predicted(depth=2)
    part.start(context())

    assert part.candidates(batch(layer=2, predicted={1: SCORES, 2: SCORES}), []) == []
    assert part.candidates(batch(layer=1, predicted={1: SCORES, 2: SCORES}), []) == [9, 11]
    assert part.candidates(batch(layer=0), []) == []


@pytest.mark.parametrize(
    ("window", "found"), [(39, []), (40, [5]), (79, [5]), (80, [5, 7]), (500, [5, 7, 4, 6])]
)
def test_the_window_admits_what_ends_inside_it(window: int, found: list[int]) -> None:
    part = WindowAware(bandwidth="profile")
    part.start(context(window=window))

    assert part.candidates(batch(predicted={1: SCORES}), []) == found


def test_what_is_queued_and_what_is_resident_count() -> None:
    part = WindowAware(bandwidth="profile")
    part.start(context(resident={5}, window=80, ahead=40))

    assert part.candidates(batch(predicted={1: SCORES}), []) == [7]


def test_a_second_horizon_waits_behind_the_first() -> None:
    part = WindowAware(depth=[1, 2], bandwidth="profile", max_candidates=1)
    part.start(context(window=45))

    assert part.candidates(batch(predicted={1: SCORES, 2: SCORES}), []) == [5, 9]
    part.start(context(window=39))
    assert part.candidates(batch(predicted={1: SCORES, 2: SCORES}), []) == [9]


def test_speculation_runs_the_predicted_experts_with_their_weights() -> None:
    part = Speculative()
    part.start(context())
    first = batch(layer=0, predicted={1: SCORES})
    routed = part.route(first)
    part.observe(routed)

    second = part.route(batch(layer=1))

    assert routed is first  # the first layer follows its router
    assert second.experts == [1, 3]
    assert second.weights == pytest.approx([0.5 / 0.8, 0.3 / 0.8])


@pytest.mark.parametrize(
    "later",
    [(2, 5), (1, 6), (0, 6)],
    ids=["a layer was left out", "another step", "the next token"],
)
def test_a_prediction_is_for_the_very_next_layer(later: tuple[int, int]) -> None:
    part = Speculative()
    part.start(context())
    part.observe(batch(layer=0, predicted={1: SCORES}))
    asked = batch(layer=later[0], step=later[1])

    assert part.route(asked) is asked


def test_prefill_follows_the_router() -> None:
    part = Speculative()
    part.start(context())
    part.observe(batch(layer=0, predicted={1: SCORES}, phase=PREFILL))
    asked = batch(layer=1, phase=PREFILL)

    assert part.route(asked) is asked


def test_starting_anew_forgets_what_was_carried() -> None:
    part = Speculative()
    part.start(context())
    part.observe(batch(layer=0, predicted={1: SCORES}))
    part.start(context())
    asked = batch(layer=1)

    assert part.route(asked) is asked


def test_ties_go_to_the_lower_id_and_weights_add_up() -> None:
    ids, weights = GATE.choose(np.zeros((2, 4), np.float32))

    assert ids.tolist() == [[0, 1], [0, 1]]
    assert weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_without_normalising_the_weights_are_the_probabilities() -> None:
    _, weights = replace(GATE, normalised=False).choose(SCORES)

    assert weights[0] == pytest.approx([0.5, 0.3])


def test_scores_of_an_unknown_kind_are_refused() -> None:
    with pytest.raises(InputError, match="does not say what its scores mean"):
        replace(GATE, score_kind="unknown").choose(SCORES)
