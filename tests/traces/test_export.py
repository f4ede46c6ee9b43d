"""Tests of exported rows."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetier.traces.columns import PAD, Columns
from moetier.traces.errors import InputError
from moetier.traces.export import CSV_COLUMNS, export
from moetier.traces.io import ArrayTrace
from moetier.traces.testing import small_header, small_rows

HEADER = small_header()


def rows_of(**shape: Any) -> tuple[Columns, ArrayTrace]:
    rows = small_rows(HEADER, **shape)
    return rows, ArrayTrace(HEADER, [rows.take(slice(0, 9)), rows.take(slice(9, None))])


def test_csv_has_a_line_per_slot_in_use(tmp_path: Path) -> None:
    rows, source = rows_of(padding=0.3, invalid=0.2, unknown=0.3)
    n_lines = export(source, tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))

    assert rows.weights is not None
    assert rows.recorded is not None
    expected = [
        {
            "request": str(rows.request[i]),
            "phase": ("prefill", "decode")[rows.phase[i]],
            "step": str(rows.step[i]),
            "position": str(rows.position[i]),
            "layer": str(rows.moe_layer[i] + 1),
            "moe_layer": str(rows.moe_layer[i]),
            "slot": str(slot),
            "expert": str(rows.experts[i, slot]),
            "weight": "" if np.isnan(rows.weights[i, slot]) else str(rows.weights[i, slot]),
            "recorded": str(rows.recorded[i, slot]),
        }
        for i in range(len(rows))
        for slot in range(3)
        if rows.valid[i] and rows.experts[i, slot] != PAD
    ]
    assert lines == expected
    assert n_lines == len(expected)
    assert list(lines[0]) == list(CSV_COLUMNS)


def test_json_lines_have_the_header_first(tmp_path: Path) -> None:
    rows, source = rows_of(padding=0.3, unknown=0.3)
    n_lines = export(source, tmp_path / "t.jsonl")
    header, *lines = map(json.loads, (tmp_path / "t.jsonl").read_text().splitlines())

    assert header == {"header": HEADER.model_dump(mode="json")}
    assert n_lines == len(lines) == len(rows)
    assert [line["experts"] for line in lines] == [
        [e for e in ids if e != PAD] for ids in rows.experts.tolist()
    ]
    assert rows.weights is not None
    assert [line["weights"] is None for line in lines] == np.isnan(rows.weights[:, 0]).tolist()


def test_weights_read_back_to_the_same_float32(tmp_path: Path) -> None:
    rows, source = rows_of()
    export(source, tmp_path / "t.jsonl")
    _, *lines = map(json.loads, (tmp_path / "t.jsonl").read_text().splitlines())

    assert rows.weights is not None
    back = np.array([line["weights"] for line in lines], np.float32)
    assert np.array_equal(back, rows.weights)


def test_what_a_trace_does_not_have_is_null(tmp_path: Path) -> None:
    header = small_header(full=False)
    rows = small_rows(header)
    rows.weights = None
    source = ArrayTrace(header, [rows])
    export(source, tmp_path / "out", "jsonl")
    export(source, tmp_path / "t.csv")
    row = json.loads((tmp_path / "out").read_text().splitlines()[1])

    assert (row["weights"], row["recorded"]) == (None, None)
    assert (tmp_path / "t.csv").read_text().splitlines()[1].endswith(f",{row['experts'][0]},,")


def test_an_unknown_format_is_refused_and_nothing_written(tmp_path: Path) -> None:
    _, source = rows_of()
    with pytest.raises(InputError, match="unknown export format 'xml'; known: csv, jsonl"):
        export(source, tmp_path / "t.xml")

    assert list(tmp_path.iterdir()) == []


def test_a_source_that_fails_leaves_nothing(tmp_path: Path) -> None:
    class Broken(ArrayTrace):
        def columns(self) -> Any:
            yield small_rows(HEADER)
            raise InputError("damaged")

    with pytest.raises(InputError, match="damaged"):
        export(Broken(HEADER, []), tmp_path / "t.csv")

    assert list(tmp_path.iterdir()) == []
