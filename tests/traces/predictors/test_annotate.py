"""Recorded routing gets the predictions of predictors that need no model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moetier.traces.batch import DECODE, LayerBatch
from moetier.traces.columns import build
from moetier.traces.errors import InputError
from moetier.traces.io import ArrayTrace
from moetier.traces.predictors import create
from moetier.traces.predictors.annotate import Annotated
from moetier.traces.schema import Header, ScoreKind
from moetier.traces.testing import small_header, small_rows

RECALL = {"kind": "recall-model", "recall": [0.886, 0.7], "seed": 3}


def header_of(kind: ScoreKind = "logits", **sizes: int) -> Header:
    return small_header(full=False, **sizes).model_copy(update={"score_kind": kind})


def trace_of(kind: ScoreKind = "logits", **shape: Any) -> ArrayTrace:
    header = header_of(kind)
    return ArrayTrace(header, [small_rows(header, **shape)])


def large(kind: ScoreKind = "none", tokens: int = 4000) -> ArrayTrace:
    """Return one prompt over three layers of 16 experts, of which low ids are popular."""
    header = header_of(kind, n_experts=16, top_k=4)
    random = np.random.default_rng(0)
    noise = random.gumbel(size=(3 * tokens, 16)) - 0.2 * np.arange(16)
    ids = (-noise).argsort(axis=1)[:, :4]
    rows = build(
        header,
        request=0,
        phase=0,
        step=0,
        position=np.tile(np.arange(tokens), 3),
        moe_layer=np.repeat(np.arange(3), tokens),
        experts=ids,
        scores=None if kind == "none" else random.random((3 * tokens, 16)),
    )
    return ArrayTrace(header, [rows])


def found_recall(batches: list[LayerBatch], horizon: int, layer: int) -> float:
    """Return the recall at k of the predictions made at *layer*."""
    scores = batches[layer].predicted[horizon]
    truth = np.reshape(batches[layer + horizon].experts, (len(scores), -1))
    top = (-scores).argsort(axis=1)[:, : truth.shape[1]]
    return float(np.mean([len(set(a) & set(b)) for a, b in zip(top, truth, strict=True)])) / 4


def test_previous_token_gives_the_scores_of_the_token_before() -> None:
    plain = list(trace_of(requests=2, prompt=3, tokens=3).batches())
    made = list(
        Annotated(trace_of(requests=2, prompt=3, tokens=3), create("previous-token")).batches()
    )
    by = {(batch.step, batch.layer): batch for batch in plain}

    for batch in made:
        assert batch.experts == by[batch.step, batch.layer].experts
        if batch.phase != DECODE or batch.layer == 2:
            assert batch.predicted == {}
            continue
        before = by[batch.step - 1, batch.layer + 1]
        assert before.requests is not None
        assert before.scores is not None
        last = [max(i for i, r in enumerate(before.requests) if r == request) for request in (0, 1)]
        np.testing.assert_array_equal(batch.predicted[1], before.scores[last])


def test_previous_token_of_a_request_never_seen_is_not_predicted() -> None:
    batches = list(Annotated(trace_of(prompt=0, tokens=2), create("previous-token")).batches())

    assert [sorted(batch.predicted) for batch in batches] == [[], [], [], [1], [1], []]


def test_previous_token_without_scores_says_what_to_do() -> None:
    source = Annotated(trace_of("none"), create("previous-token"))

    with pytest.raises(InputError, match=r"no router scores; .*popularity or recall-model"):
        next(source.batches())


@pytest.mark.parametrize("kind", ["logits", "probabilities", "none"])
def test_popularity_gives_the_counts_so_far(kind: ScoreKind) -> None:
    predictor = create({"kind": "popularity", "horizons": [1, 2]})
    counts = np.zeros((3, 8))
    seen = 0
    for batch in Annotated(trace_of(kind), predictor).batches():
        for horizon, scores in batch.predicted.items():
            share = counts[batch.layer + horizon] / counts[batch.layer + horizon].sum()
            wanted = np.log(np.maximum(share, 1e-6)) if kind == "logits" else share
            np.testing.assert_allclose(scores, np.tile(wanted, (batch.n_tokens, 1)), rtol=1e-6)
            seen += 1
        counts[batch.layer] += np.bincount(batch.experts, minlength=8)
    assert seen == 4 * 3  # layers 0 and 1, of which only layer 0 has a second one ahead


@pytest.mark.parametrize("horizon", [1, 2])
def test_recall_model_meets_the_cited_recall(horizon: int) -> None:
    made = list(Annotated(large(), create(RECALL)).batches())
    cited = RECALL["recall"][horizon - 1]  # type: ignore[index]  # a list of floats
    error = (cited * (1 - cited) / (4 * 4000)) ** 0.5

    assert found_recall(made, horizon, 0) == pytest.approx(cited, abs=4 * error)


@pytest.mark.parametrize(("recall", "expected"), [(1.0, 1.0), (0.0, 0.0)])
def test_recall_model_at_its_ends(recall: float, expected: float) -> None:
    spec = {"kind": "recall-model", "recall": [recall]}
    made = list(Annotated(large(tokens=200), create(spec)).batches())

    assert found_recall(made, 1, 0) == expected


def test_recall_model_draws_wrong_experts_by_popularity() -> None:
    batches = list(Annotated(large(), create({"kind": "recall-model", "recall": [0.0]})).batches())
    top = (-batches[0].predicted[1]).argsort(axis=1)[:, :4]
    counts = np.bincount(top.ravel(), minlength=16)

    # popular experts are rarely wrong, as they are mostly true; compare those seldom chosen
    assert counts[8] > counts[15]
    assert (counts > 0).all()


def test_recall_model_says_the_same_again_and_other_things_for_another_seed() -> None:
    first = Annotated(large(tokens=20), create(RECALL))
    once, again = list(first.batches()), list(first.batches())
    fresh = list(Annotated(large(tokens=20), create(RECALL)).batches())
    other = list(Annotated(large(tokens=20), create({**RECALL, "seed": 4})).batches())

    for batches in (again, fresh):
        np.testing.assert_array_equal(once[0].predicted[1], batches[0].predicted[1])
        np.testing.assert_array_equal(once[0].predicted[2], batches[0].predicted[2])
    assert (once[0].predicted[1] != other[0].predicted[1]).any()


@pytest.mark.parametrize("kind", ["logits", "none"])
def test_scores_of_the_recall_model_are_shares(kind: ScoreKind) -> None:
    made = next(Annotated(large(kind, tokens=50), create(RECALL)).batches()).predicted[1]
    shares = np.exp(made) if kind == "logits" else made
    ordered = np.sort(shares, axis=1)[:, ::-1]

    assert (ordered[:, 3] > ordered[:, 4]).all()
    assert (shares.sum(axis=1) <= 1 + 1e-5).all()
    assert ordered[:, :4].sum(axis=1) == pytest.approx(0.9, abs=1e-4)


def test_nothing_is_predicted_beyond_the_last_layer() -> None:
    made = list(Annotated(trace_of(), create(RECALL)).batches())

    assert [sorted(batch.predicted) for batch in made[:6]] == [[1, 2], [1], []] * 2
    assert len(made) == len(list(trace_of().batches()))


def test_a_batch_of_other_tokens_ahead_is_not_used() -> None:
    rows = small_rows(header_of(), requests=3, tokens=2)
    gone = (rows.moe_layer == 1) & (rows.request == 2) & (rows.step == 1)
    rows = replace(rows, valid=rows.valid & ~gone)
    made = list(Annotated(ArrayTrace(header_of(), [rows]), create(RECALL)).batches())

    assert [sorted(batch.predicted) for batch in made if batch.step == 1] == [[2], [], []]


def test_padded_slots_are_no_experts() -> None:
    source = trace_of(padding=0.4)
    full = Annotated(source, create({"kind": "recall-model", "recall": [1.0]}))
    for batch, later in zip(full.batches(), list(full.batches())[1:], strict=False):
        if 1 not in batch.predicted:
            continue
        for token, scores in enumerate(batch.predicted[1]):
            mine = {e for t, e in zip(later.token_ids(), later.experts, strict=True) if t == token}
            best = np.argsort(-scores)[: len(mine)]
            assert set(best.tolist()) == mine


def test_the_header_says_who_predicts() -> None:
    source = trace_of()
    made = Annotated(source, create(RECALL))

    assert [(p.name, p.horizon, p.nbytes) for p in made.header.predictors] == [
        ("recall-model", 1, 0),
        ("recall-model", 2, 0),
    ]
    assert made.header.geometry == source.header.geometry
    assert made.assumption is not None
    assert "cited recall of 88.6 %, 70 %" in made.assumption
    assert Annotated(source, create("popularity")).assumption is None


def test_the_source_is_left_as_it_is() -> None:
    source = trace_of()
    made = Annotated(source, create("popularity"))
    list(made.batches())

    assert all(batch.predicted == {} for batch in source.batches())
    assert sum(len(chunk) for chunk in made.columns()) == source.n_rows


def test_a_source_of_batches_alone_has_no_columns() -> None:
    class Bare:
        header = header_of()

        def batches(self) -> Any:
            return (replace(batch) for batch in trace_of().batches())

    made = Annotated(Bare(), create("popularity"))

    assert len(list(made.batches())) == len(list(trace_of().batches()))
    with pytest.raises(InputError, match="no rows"):
        made.columns()


def test_a_predictor_of_a_model_is_refused() -> None:
    with pytest.raises(InputError, match=r"'low-rank' works inside a model.*--predictor"):
        Annotated(trace_of(), create("low-rank"))
