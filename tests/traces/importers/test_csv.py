"""Tests of reading CSV in blocks, against the standard library's reader."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moetier.traces.errors import InputError
from moetier.traces.importers._csv import Table, join, read_tables

NEEDED = {"a": int, "b": float}
OPTIONAL = {"c": int}


def tables(path: Path, text: str, **options: bool) -> list[Table]:
    path.write_text(text)
    return list(read_tables(path, NEEDED, OPTIONAL, **options))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "t.csv"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(-(10**12), 10**12),
            st.one_of(st.floats(width=32, allow_infinity=False), st.just(math.nan)),
            st.sampled_from(["x", "", "10"]),
        ),
        min_size=1,
        max_size=30,
    ),
    remarks=st.sets(st.integers(0, 29)),
    ending=st.sampled_from(["\n", "\r\n"]),
    last=st.booleans(),
    block=st.integers(1, 300),
    whole=st.booleans(),
)
def test_rows_are_those_of_the_standard_reader(
    path: Path,
    rows: list[tuple[int, float, str]],
    remarks: set[int],
    ending: str,
    last: bool,
    block: int,
    whole: bool,
) -> None:
    lines = ["# preamble", "other,a,b"]
    for i, (a, b, other) in enumerate(rows):
        lines += ["# remark", ""] if i in remarks else []
        lines.append(f"{other},{a},{b!r}")
    with path.open("w", newline="") as file:
        file.write(ending.join(lines) + (ending if last else ""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moetier.traces.importers._csv.BLOCK_BYTES", block)
        table = join(list(read_tables(path, NEEDED, OPTIONAL, whole=whole)))

    with path.open(newline="") as file:
        data = [(n, row) for n, row in enumerate(csv.reader(file), 1) if row and row[0][:1] != "#"]
    expected = data[1:]
    assert table.columns["a"].tolist() == [int(row[1]) for _, row in expected]
    assert np.array_equal(
        table.columns["b"], np.array([float(row[2]) for _, row in expected], np.float32), True
    )
    assert table.lines.tolist() == [n for n, _ in expected]
    assert "c" not in table.columns


def test_a_whole_file_is_one_table(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moetier.traces.importers._csv.BLOCK_BYTES", 7)
    text = "a,b,c\n1,2,3\n4,5,6\n7,8,9\n"

    assert [len(table) for table in tables(path, text)] == [2, 1]
    assert [len(table) for table in tables(path, text, whole=True)] == [3]
    assert [table.columns["c"].tolist() for table in tables(path, text)] == [[3, 6], [9]]


def test_rows_can_be_taken_in_any_order(path: Path) -> None:
    (table,) = tables(path, "a,b\n1,2\n3,4\n5,6\n")
    taken = table.take(np.array([2, 0]))

    assert taken.columns["a"].tolist() == [5, 1]
    assert taken.lines.tolist() == [4, 2]


def test_an_optional_column_is_checked_where_it_is_there(path: Path) -> None:
    with pytest.raises(InputError, match="line 3, column 'c': 'x' is not a whole number"):
        tables(path, "a,b,c\n1,2,3\n4,5,x\n")


def test_too_many_values_are_refused(path: Path) -> None:
    with pytest.raises(InputError, match=r"line 3: 3 values, expected 2"):
        tables(path, "a,b\n1,2\n3,4,5\n")


def test_an_integer_beyond_64_bit_is_refused(path: Path) -> None:
    with pytest.raises(InputError, match=r"lines 2 to 2: "):
        tables(path, "a,b\n99999999999999999999,2\n")


def test_a_file_of_remarks_has_no_rows(path: Path) -> None:
    assert tables(path, "a,b\n# one\n\n# two\n") == []
