"""Tests of batching against a plain loop over rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moetier.traces.batch import LayerBatch
from moetier.traces.batching import batches_of
from moetier.traces.columns import PAD, Columns
from moetier.traces.testing import small_header, small_rows


def one_by_one(rows: Columns) -> Iterator[dict[str, Any]]:
    """Yield what each batch should hold, from rows taken one by one."""

    def known(array: Any, members: list[int]) -> Any:
        if array is None or any(np.isnan(array[i]).any() for i in members):
            return None
        return [array[i].tolist() for i in members]

    keys = zip(rows.step.tolist(), rows.moe_layer.tolist(), strict=True)
    for (step, layer), group in groupby(enumerate(keys), key=lambda item: item[1]):
        members = [i for i, _ in group if rows.valid[i]]
        if not members:
            continue
        slots = [
            (token, i, slot)
            for token, i in enumerate(members)
            for slot in range(rows.experts.shape[1])
            if rows.experts[i, slot] != PAD
        ]
        weights = known(rows.weights, members)
        yield {
            "step": step,
            "layer": layer,
            "phase": int(rows.phase[members[0]]),
            "n_tokens": len(members),
            "context": sum(int(rows.position[i]) + 1 for i in members),
            "experts": [int(rows.experts[i, slot]) for _, i, slot in slots],
            "tokens": [token for token, _, _ in slots],
            "requests": [int(rows.request[i]) for i in members],
            "weights": None if weights is None else [weights[t][slot] for t, _, slot in slots],
            "scores": known(rows.scores, members),
            "predicted": {
                horizon: values
                for horizon, array in rows.predicted.items()
                if (values := known(array, members)) is not None
            },
            "recorded": None
            if rows.recorded is None
            else [int(rows.recorded[i, slot]) for _, i, slot in slots],
        }


def as_plain(batch: LayerBatch) -> dict[str, Any]:
    def plain(array: Any) -> Any:
        return None if array is None else array.tolist()

    return {
        "step": batch.step,
        "layer": batch.layer,
        "phase": batch.phase,
        "n_tokens": batch.n_tokens,
        "context": batch.context,
        "experts": batch.experts,
        "tokens": batch.token_ids(),
        "requests": batch.requests,
        "weights": plain(batch.weights),
        "scores": plain(batch.scores),
        "predicted": {horizon: plain(array) for horizon, array in batch.predicted.items()},
        "recorded": batch.recorded,
    }


def cut(rows: Columns, cuts: list[int]) -> list[Columns]:
    edges = [0, *sorted(at % (len(rows) + 1) for at in cuts), len(rows)]
    return [rows.take(slice(a, b)) for a, b in pairwise(edges)]


@given(
    full=st.booleans(),
    requests=st.integers(1, 3),
    prompt=st.integers(0, 3),
    tokens=st.integers(1, 4),
    padding=st.sampled_from([0.0, 0.3, 1.0]),
    invalid=st.sampled_from([0.0, 0.3, 1.0]),
    unknown=st.sampled_from([0.0, 0.3, 1.0]),
    cuts=st.lists(st.integers(0, 200), max_size=6),
    seed=st.integers(0, 99),
)
def test_batches_hold_what_a_plain_loop_finds(full: bool, cuts: list[int], **shape: Any) -> None:
    rows = small_rows(small_header(full=full), **shape)

    batches = list(batches_of(cut(rows, cuts)))

    assert [as_plain(batch) for batch in batches] == list(one_by_one(rows))


def test_token_lists_are_left_out_where_tokens_are_even() -> None:
    even = small_rows(small_header())
    ragged = small_rows(small_header(), padding=0.3)

    assert all(batch.tokens is None for batch in batches_of([even]))
    assert any(batch.tokens is not None for batch in batches_of([ragged]))


def test_ids_are_plain_integers() -> None:
    batch = next(batches_of([small_rows(small_header())]))

    assert {type(item) for item in batch.experts} == {int}
    assert type(batch.step) is type(batch.context) is int


def test_no_rows_make_no_batch() -> None:
    rows = small_rows(small_header())

    assert list(batches_of([])) == []
    assert list(batches_of([rows.take(slice(0, 0))])) == []
