"""Weights that router scores give to experts they did not choose."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetier.traces.gating import GateRule
from moetier.traces.schema import ScoreKind

SHARES = np.array([[0.1, 0.5, 0.1, 0.3], [0.4, 0.2, 0.3, 0.1]], np.float32)
LOGITS = np.log(SHARES)
RULE = GateRule(top_k=2, score_kind="logits", normalised=True)
IDS = np.array([[0, 3], [3, 1]])


def test_any_experts_are_weighed_by_their_own_scores() -> None:
    assert RULE.weigh(LOGITS, IDS) == pytest.approx(np.array([[0.25, 0.75], [1 / 3, 2 / 3]]))


def test_without_normalising_weights_are_shares_of_all_experts() -> None:
    found = replace(RULE, normalised=False).weigh(LOGITS, IDS)

    assert found == pytest.approx(np.array([[0.1, 0.3], [0.1, 0.2]]))


@pytest.mark.parametrize("kind", ["probabilities", "sigmoid"])
def test_shares_are_taken_as_they_are(kind: ScoreKind) -> None:
    rule = replace(RULE, score_kind=kind)

    assert rule.weigh(SHARES, IDS) == pytest.approx(np.array([[0.25, 0.75], [1 / 3, 2 / 3]]))


def test_experts_far_below_the_first_still_have_weights() -> None:
    """Their share of the softmax over all is 0 in float32."""
    scores = np.array([[0.0, -200.0, -200.0, -201.0]], np.float32)
    found = RULE.weigh(scores, np.array([[1, 2]]))

    assert found.tolist() == [[0.5, 0.5]]


@given(st.integers(0, 2**32 - 1), st.booleans(), st.integers(1, 5))
def test_what_is_chosen_is_weighed_alike(seed: int, normalised: bool, k: int) -> None:
    rule = GateRule(k, "logits", normalised)
    scores = np.random.default_rng(seed).normal(0, 5, (3, 6)).astype(np.float32)
    ids, weights = rule.choose(scores)

    assert weights.dtype == np.float32
    assert np.array_equal(weights, rule.weigh(scores, ids))
    assert np.all(np.diff(np.take_along_axis(scores, ids, axis=1)) <= 0)
    if normalised:
        assert weights.sum(axis=1) == pytest.approx(1)
