"""Tests of the layer batch."""

from __future__ import annotations

from moetier.traces.batch import DECODE, LayerBatch


def test_tokens_of_an_even_batch_follow_from_their_number() -> None:
    batch = LayerBatch(0, DECODE, 0, 2, 2, [5, 6, 7, 8])

    assert batch.token_ids() == [0, 0, 1, 1]


def test_tokens_of_a_ragged_batch_are_its_own() -> None:
    batch = LayerBatch(0, DECODE, 0, 2, 2, [5, 6, 7], tokens=[0, 1, 1])

    assert batch.token_ids() == [0, 1, 1]


def test_a_batch_without_tokens_has_none() -> None:
    assert LayerBatch(0, DECODE, 0, 0, 0, []).token_ids() == []


def test_batches_do_not_share_their_predictions() -> None:
    first, second = LayerBatch(0, DECODE, 0, 0, 0, []), LayerBatch(0, DECODE, 0, 0, 0, [])

    assert first.predicted is not second.predicted
