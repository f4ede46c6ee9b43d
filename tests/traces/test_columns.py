"""Tests of rows as arrays."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetier.traces.columns import PAD, Columns, build, concat, from_arrow
from moetier.traces.testing import small_header, small_rows

ARRAYS = (
    "request", "phase", "step", "position", "moe_layer", "experts", "valid", "weights", "scores",
    "recorded",
)  # fmt: skip


def same(a: Columns, b: Columns) -> bool:
    """Return whether all arrays agree in value and type, NaN equal to NaN."""
    for name in ARRAYS:
        x, y = getattr(a, name), getattr(b, name)
        if (x is None) != (y is None):
            return False
        if x is not None and (x.dtype != y.dtype or not np.array_equal(x, y, x.dtype.kind == "f")):
            return False
    return a.predicted.keys() == b.predicted.keys() and all(
        np.array_equal(a.predicted[h], b.predicted[h], True) for h in a.predicted
    )


@given(
    full=st.booleans(),
    padding=st.sampled_from([0.0, 0.3]),
    unknown=st.sampled_from([0.0, 0.3]),
    start=st.integers(0, 10),
    seed=st.integers(0, 99),
)
def test_arrow_and_back(full: bool, padding: float, unknown: float, start: int, seed: int) -> None:
    header = small_header(full=full)
    rows = small_rows(header, padding=padding, unknown=unknown, seed=seed)

    back = from_arrow(rows.to_arrow(header).slice(start))

    assert same(back, rows.take(slice(start, None)))


def test_what_is_not_known_is_null_in_arrow_and_none_after() -> None:
    header = small_header()
    rows = small_rows(header, unknown=1.0)
    table = rows.to_arrow(header)

    assert table.column("weights").null_count == len(rows)
    assert table.column("weights").values.null_count in (0, len(rows) * 3)
    back = from_arrow(table)
    assert (back.weights, back.scores, back.predicted) == (None, None, {})


def test_the_model_layer_is_written_beside_the_moe_layer() -> None:
    header = small_header()
    rows = small_rows(header)

    assert rows.to_arrow(header).column("layer").to_pylist() == (rows.moe_layer + 1).tolist()


def test_null_ids_are_padding() -> None:
    header = small_header(full=False)
    table = small_rows(header).to_arrow(header)
    at = table.schema.get_field_index("experts")
    ids = pa.array([[None, 1, 2]] * table.num_rows, table.schema.field("experts").type)

    back = from_arrow(table.set_column(at, "experts", ids))

    assert back.experts[0].tolist() == [PAD, 1, 2]


@given(cuts=st.lists(st.integers(0, 42), max_size=4), seed=st.integers(0, 9))
def test_concat_undoes_take(cuts: list[int], seed: int) -> None:
    rows = small_rows(small_header(), unknown=0.2, seed=seed)
    edges = [0, *sorted(cuts), len(rows)]

    parts = [rows.take(slice(a, b)) for a, b in pairwise(edges)]

    assert same(concat(parts), rows)


def test_concat_fills_what_one_part_lacks() -> None:
    rows = small_rows(small_header())
    bare = small_rows(small_header(full=False))
    bare.weights = None

    both = concat([rows, bare])

    assert both.weights is not None
    assert np.isnan(both.weights[len(rows) :]).all()
    assert both.recorded is not None
    assert (both.recorded[len(rows) :] == PAD).all()
    assert sorted(both.predicted) == [1, 2]
    assert concat([bare, bare]).weights is None


GOOD: dict[str, Any] = {
    "request": 0, "phase": 1, "step": [0, 1], "position": [0, 1], "moe_layer": 0,
    "experts": [[0, 1, 2], [3, 4, 5]],
}  # fmt: skip


def test_a_scalar_stands_for_every_row() -> None:
    rows = build(small_header(), **GOOD)

    assert rows.phase.tolist() == [1, 1]
    assert rows.valid.tolist() == [True, True]
    assert (str(rows.experts.dtype), str(rows.step.dtype)) == ("int16", "int32")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": [0, 1, 2]}, r"step has shape \(3,\), expected \(2,\)"),
        ({"experts": [[0, 1]]}, r"experts has shape \(1, 2\), expected \(rows, 3\)"),
        ({"weights": [[0.5, 0.5, 0]]}, "weights has 1 rows, expected 2"),
        ({"scores": [[0.5] * 3] * 2}, r"scores has shape \(2, 3\), expected \(rows, 8\)"),
        (
            {"predicted": {3: [[0.5] * 8] * 2}},
            r"predicted\[3\] given, but the header's",
        ),
        ({"step": np.array([0, 1 << 40])}, "step has 0 to 1099511627776, allowed -2147483648"),
        ({"experts": np.full((2, 3), 70_000)}, "experts has 70000 to 70000, allowed -32768"),
    ],
)
def test_arrays_that_do_not_fit_are_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(small_header(), **{**GOOD, **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scores": [[0.5] * 8] * 2}, "score_kind is 'none'"),
        ({"recorded": [[0] * 3] * 2}, "recorded_residency is false"),
    ],
)
def test_columns_that_the_header_does_not_announce_are_refused(
    change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        build(small_header(full=False), **{**GOOD, **change})
