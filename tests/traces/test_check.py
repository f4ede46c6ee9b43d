"""Tests that each fault of a row is found, named and placed - wherever chunks begin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetier.traces.check import RowCheck
from moetier.traces.columns import Columns
from moetier.traces.errors import InputError
from moetier.traces.io import TraceReader
from moetier.traces.testing import small_header, small_rows

HEADER = small_header()
ROWS = len(small_rows(HEADER))

Fault = Callable[[Columns], None]


def put(name: str, row: int, value: Any, slot: int | None = None) -> Fault:
    def change(rows: Columns) -> None:
        array = getattr(rows, name).copy()
        if slot is None:
            array[row] = value
        else:
            array[row, slot] = value
        setattr(rows, name, array)

    return change


def swap(rows: Columns) -> None:
    order = np.arange(len(rows))
    order[[10, 30]] = [30, 10]
    changed = rows.take(order)
    for name in ("step", "moe_layer", "phase", "request", "position"):
        setattr(rows, name, getattr(changed, name))


def predicted_nan(rows: Columns) -> None:
    rows.predicted[2][4, 0] = np.nan


def repeat_row(rows: Columns) -> None:
    rows.position = rows.position.copy()
    rows.position[2] = rows.position[0]


ALWAYS: list[tuple[Fault, str]] = [
    (put("experts", 20, 8, 1), "row 20, column 'experts': 8 is out of range, expected -1 to 7"),
    (put("experts", 20, -2, 0), "row 20, column 'experts': -2 is out of range"),
    (put("request", 3, -1), "row 3, column 'request': -1 is out of range, expected at least 0"),
    (put("position", 3, -5), "row 3, column 'position': -5 is out of range"),
    (put("step", 0, -1), "row 0, column 'step': -1 is out of range"),
    (put("phase", 41, 2), "row 41, column 'phase': 2 is out of range, expected 0 to 1"),
    (put("moe_layer", 41, 3), "row 41, column 'moe_layer': 3 is out of range, expected 0 to 2"),
    (put("recorded", 7, 3, 2), "row 7, column 'recorded': 3 is out of range, expected -1 to 2"),
    (put("weights", 9, np.nan, 1), "row 9, column 'weights': nan is not finite"),
    (put("weights", 9, -0.25, 0), "row 9, column 'weights': -0.25 is negative"),
    (put("weights", 9, np.inf, 0), "row 9, column 'weights': inf is not finite"),
    (put("scores", 9, -np.inf, 5), "row 9, column 'scores': -inf is not finite"),
    (predicted_nan, "row 4, column 'predicted_2': nan is not finite"),
    (put("step", 41, 1), "row 41, column 'step': step 1, MoE layer 2 comes after step 4, MoE"),
    (swap, "row 11, column 'step': step 0, MoE layer 1 comes after step 3, MoE layer 0"),
    (put("phase", 1, 1), "row 1, column 'phase': step 0 mixes prefill and decode"),
]
FULL: list[tuple[Fault, str]] = [
    (put("experts", 17, 0), "row 17, column 'experts': all 3 ids are 0, which is padding"),
    (put("experts", 17, [4, 6, 4]), "row 17, column 'experts': expert 4 appears twice in one"),
    (repeat_row, "row 2, column 'position': request 0, step 0, position 0, MoE layer 0 appears t"),
]


def run(rows: Columns, *, full: bool, cuts: list[int]) -> None:
    check = RowCheck(HEADER, "t.parquet", full=full)
    edges = [0, *sorted(cuts), len(rows)]
    for i in range(len(edges) - 1):
        check.check(rows.take(slice(edges[i], edges[i + 1])))
    assert check.rows == len(rows)


CUTS = st.lists(st.integers(0, ROWS), max_size=5)


@given(cuts=CUTS, full=st.booleans())
def test_good_rows_pass(cuts: list[int], full: bool) -> None:
    rows = small_rows(HEADER, padding=0.2, invalid=0.2, unknown=0.2)

    run(rows, full=full, cuts=cuts)


@pytest.mark.parametrize(
    ("fault", "words", "full"),
    [(fault, words, False) for fault, words in ALWAYS]
    + [(fault, words, True) for fault, words in FULL],
)
@given(cuts=CUTS)
def test_each_fault_is_placed_exactly(
    fault: Fault, words: str, full: bool, cuts: list[int]
) -> None:
    rows = small_rows(HEADER)
    fault(rows)
    with pytest.raises(InputError) as caught:
        run(rows, full=full, cuts=cuts)

    assert str(caught.value).startswith(f"t.parquet: {words}")


@pytest.mark.parametrize(("fault", "words"), ALWAYS)
def test_reading_alone_finds_what_would_break_a_run(fault: Fault, words: str) -> None:
    rows = small_rows(HEADER)
    fault(rows)
    with pytest.raises(InputError) as caught:
        run(rows, full=False, cuts=[])

    assert words in str(caught.value)


@pytest.mark.parametrize(("fault", "words"), FULL)
def test_invalid_rows_may_hold_anything_in_range(fault: Fault, words: str) -> None:
    rows = small_rows(HEADER)
    fault(rows)
    rows.valid = np.zeros(len(rows), np.bool_)

    run(rows, full=True, cuts=[])


def without(rows: Columns, step: int, layer: int) -> Columns:
    return rows.take((rows.step != step) | (rows.moe_layer != layer))


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_step_that_leaves_out_a_layer_is_refused(layer: int) -> None:
    rows = without(small_rows(HEADER), step=2, layer=layer)
    with pytest.raises(InputError, match="a layer is missing"):
        run(rows, full=True, cuts=[5, 20])

    run(rows, full=False, cuts=[5, 20])  # a writer may see a part of the rows


def test_a_first_step_begins_at_the_first_layer() -> None:
    with pytest.raises(InputError, match=r"row 0, column 'moe_layer'.*a layer is missing"):
        run(without(small_rows(HEADER), step=0, layer=0), full=True, cuts=[])


def test_rows_that_end_in_the_middle_of_a_step_are_refused() -> None:
    rows = small_rows(HEADER)
    whole, cut = RowCheck(HEADER, "t", full=True), RowCheck(HEADER, "t", full=True)
    whole.check(rows)
    cut.check(without(rows, step=int(rows.step[-1]), layer=2))

    whole.finish()
    with pytest.raises(InputError, match="ends at MoE layer 1 of 2"):
        cut.finish()


def test_expert_0_alone_is_no_padding() -> None:
    header = small_header(top_k=1)
    rows = small_rows(header)
    rows.experts[:] = 0
    check = RowCheck(header, "t", full=True)

    assert check.check(rows) is rows


def rewrite(path: Path, column: str, values: Any) -> Path:
    """Write a trace at *path* with one column of its own, past the writer's checks."""
    table = pa.Table.from_batches([small_rows(HEADER).to_arrow(HEADER)])
    at = table.schema.get_field_index(column)
    field = table.schema.field(column)
    table = table.set_column(at, field, pa.array(values, field.type))
    pq.write_table(table, path)
    return path


def test_validate_checks_the_model_layer(tmp_path: Path) -> None:
    layers = (small_rows(HEADER).moe_layer + 1).tolist()
    layers[5] = 3
    reader = TraceReader(rewrite(tmp_path / "t.parquet", "layer", layers))
    assert sum(1 for _ in reader.batches()) > 0  # a run does not need this column
    with pytest.raises(InputError, match="row 5, column 'layer': model layer 3 is not MoE layer 0"):
        reader.validate()


def test_a_null_is_named(tmp_path: Path) -> None:
    steps = small_rows(HEADER).step.tolist()
    steps[6] = None
    reader = TraceReader(rewrite(tmp_path / "t.parquet", "step", steps))
    with pytest.raises(InputError, match="row 6, column 'step': is null"):
        list(reader.batches())


def test_faults_are_found_in_a_file_too(tmp_path: Path) -> None:
    ids = small_rows(HEADER).experts.tolist()
    ids[33] = [0, 0, 0]
    reader = TraceReader(rewrite(tmp_path / "t.parquet", "experts", ids))
    with pytest.raises(InputError, match=r"t\.parquet: row 33, column 'experts': all 3 ids are 0"):
        reader.validate()
