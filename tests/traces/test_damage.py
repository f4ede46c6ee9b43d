"""This module tests that damage inside a trace file is found, not computed with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moetier.traces.errors import InputError
from moetier.traces.io import TraceReader, TraceWriter
from moetier.traces.testing import small_header, small_rows

HEADER = small_header()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.parquet"
    with TraceWriter(path, HEADER) as writer:
        writer.add_columns(small_rows(HEADER, tokens=400))
    return path


def test_overwritten_bytes_are_found(trace: Path) -> None:
    data = bytearray(trace.read_bytes())
    middle = len(data) // 3
    data[middle : middle + 64] = bytes(64)
    trace.write_bytes(data)

    with pytest.raises(InputError, match="damaged"):
        TraceReader(trace).validate()


def test_nan_that_is_not_null_is_refused(trace: Path) -> None:
    table = pq.read_table(trace)
    at = table.schema.get_field_index("weights")
    kind = table.schema.field(at).type
    nan = np.full((len(table), kind.list_size), np.nan, np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(nan.reshape(-1)), type=kind)
    pq.write_table(table.set_column(at, table.schema.field(at), column), trace)

    with pytest.raises(InputError, match="row 0, column 'weights': NaN"):
        next(TraceReader(trace).batches())


def test_a_run_reads_no_duplicate_rows(trace: Path) -> None:
    table = pq.read_table(trace)
    twice = pa.concat_tables([table.slice(0, 1), table])
    pq.write_table(twice, trace)

    with pytest.raises(InputError, match="appears twice"):
        next(TraceReader(trace).batches())
