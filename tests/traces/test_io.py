"""Tests of writing traces and reading them back."""

from __future__ import annotations

import gc
import hashlib
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moetier.traces.batch import LayerBatch
from moetier.traces.columns import Columns
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.traces.io import ArrayTrace, TraceReader, TraceWriter, write_trace
from moetier.traces.schema import Header, Provenance
from moetier.traces.synthetic import Synthetic
from moetier.traces.testing import small_header, small_rows


def write(path: Path, header: Header, rows: Columns, rows_per_group: int | None = None) -> Path:
    with TraceWriter(path, header, rows_per_group) as writer:
        writer.add_columns(rows)
    return path


def plain(batch: LayerBatch) -> tuple[Any, ...]:
    arrays = [batch.weights, batch.scores, *(batch.predicted[h] for h in sorted(batch.predicted))]
    return (
        batch.step, batch.phase, batch.layer, batch.n_tokens, batch.context, batch.experts,
        batch.tokens, batch.requests, batch.recorded,
        [None if array is None else array.tolist() for array in arrays],
    )  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(
    full=st.booleans(),
    rows_per_group=st.integers(1, 50),
    requests=st.integers(1, 3),
    padding=st.sampled_from([0.0, 0.3]),
    invalid=st.sampled_from([0.0, 0.3]),
    unknown=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 99),
)
def test_a_file_gives_the_same_batches_as_memory(
    tmp_path: Path, full: bool, rows_per_group: int, **shape: Any
) -> None:
    header = small_header(full=full)
    rows = small_rows(header, **shape)
    path = write(tmp_path / "t.parquet", header, rows, rows_per_group)

    reader = TraceReader(path, with_scores=True)

    assert reader.header == header
    assert reader.n_rows == len(rows)
    expected = [plain(batch) for batch in ArrayTrace(header, [rows]).batches()]
    assert [plain(batch) for batch in reader.batches()] == expected
    assert [plain(batch) for batch in reader.batches()] == expected  # a second time


def test_scores_are_read_only_when_asked_for(tmp_path: Path) -> None:
    header = small_header()
    path = write(tmp_path / "t.parquet", header, small_rows(header))

    without, having = (
        next(iter(TraceReader(path, with_scores=flag).batches())) for flag in (False, True)
    )

    assert (without.scores, without.predicted) == (None, {})
    assert having.scores is not None
    assert having.scores.shape == (having.n_tokens, 8)
    assert sorted(having.predicted) == [1, 2]
    assert without.weights is not None
    assert without.recorded is not None
    assert without.recorded == having.recorded


def test_columns_can_be_chosen(tmp_path: Path) -> None:
    header = small_header()
    path = write(tmp_path / "t.parquet", header, small_rows(header))

    bare = next(TraceReader(path).columns([]))
    predicted = next(TraceReader(path).columns(["predicted_2"]))

    assert (bare.weights, bare.scores, bare.recorded) == (None, None, None)
    assert sorted(predicted.predicted) == [2]


def test_batches_straddle_row_groups(tmp_path: Path) -> None:
    header = small_header()
    rows = small_rows(header, prompt=20)
    path = write(tmp_path / "t.parquet", header, rows, rows_per_group=7)
    metadata = pq.read_metadata(path)

    assert metadata.num_row_groups == -(-len(rows) // 7)
    assert [batch.n_tokens for batch in TraceReader(path).batches()][:3] == [40, 40, 40]


def test_many_small_adds_make_whole_row_groups(tmp_path: Path) -> None:
    header, path = small_header(), tmp_path / "t.parquet"
    rows = small_rows(header)
    with TraceWriter(path, header, rows_per_group=10) as writer:
        for i in range(len(rows)):
            writer.add_columns(rows.take(slice(i, i + 1)))
        assert writer.n_rows == len(rows)
    metadata = pq.read_metadata(path)
    sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]

    assert sizes == [10, 10, 10, 10, 2]
    assert TraceReader(path).validate() == len(rows)


def test_wide_rows_make_small_groups(tmp_path: Path) -> None:
    narrow = TraceWriter(tmp_path / "a", small_header(full=False))
    wide = TraceWriter(tmp_path / "b", small_header(n_experts=4096))

    assert narrow.rows_per_group == 65_536
    assert 100 < wide.rows_per_group < 1000


def test_an_error_leaves_no_file(tmp_path: Path) -> None:
    header, path = small_header(), tmp_path / "t.parquet"

    def stop_half_way() -> None:
        with TraceWriter(path, header, rows_per_group=5) as writer:
            writer.add_columns(small_rows(header))
            raise RuntimeError("out of prompts")

    with pytest.raises(RuntimeError, match="out of prompts"):
        stop_half_way()

    assert list(tmp_path.iterdir()) == []


def test_no_rows_are_an_error_and_leave_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no rows"), TraceWriter(tmp_path / "t", small_header()):
        pass

    assert list(tmp_path.iterdir()) == []


def test_rows_that_could_not_be_read_back_are_refused(tmp_path: Path) -> None:
    header = small_header()
    rows = small_rows(header)
    rows.experts[5, 1] = 99
    with pytest.raises(InputError, match="row 5, column 'experts': 99 is out of range"):
        write(tmp_path / "t.parquet", header, rows)

    assert list(tmp_path.iterdir()) == []


def test_a_writer_is_a_context_manager(tmp_path: Path) -> None:
    header = small_header()
    writer = TraceWriter(tmp_path / "t.parquet", header)
    with pytest.raises(ValueError, match="context manager"):
        writer.add_columns(small_rows(header))


def test_the_same_rows_make_the_same_file(tmp_path: Path) -> None:
    header = small_header()
    rows = small_rows(header)
    a, b = (TraceReader(write(tmp_path / name, header, rows)) for name in ("a", "b"))
    other = TraceReader(write(tmp_path / "c", header, small_rows(header, seed=1)))

    assert a.fingerprint == b.fingerprint
    assert a.fingerprint == hashlib.sha256((tmp_path / "a").read_bytes()).hexdigest()
    assert other.fingerprint != a.fingerprint


def test_a_reader_can_be_sent_to_another_process(tmp_path: Path) -> None:
    header = small_header()
    reader = TraceReader(write(tmp_path / "t.parquet", header, small_rows(header)))

    copy = pickle.loads(pickle.dumps(reader))

    assert [plain(batch) for batch in copy.batches()] == [plain(b) for b in reader.batches()]


def test_a_file_damaged_in_the_middle_is_named_while_reading(tmp_path: Path) -> None:
    header = small_header()
    path = write(tmp_path / "t.parquet", header, small_rows(header, tokens=200))
    content = bytearray(path.read_bytes())
    content[100:2000] = bytes(1900)
    path.write_bytes(content)
    reader = TraceReader(path)
    with pytest.raises(InputError, match=r"t\.parquet: damaged after row 0"):
        list(reader.batches())


def test_an_array_trace_checks_its_rows() -> None:
    header = small_header()
    rows = small_rows(header)
    assert ArrayTrace(header, [rows]).n_rows == len(rows)
    with pytest.raises(InputError, match="comes after"):
        ArrayTrace(header, [rows, rows])


def test_a_trace_can_be_copied_whole_or_chunk_by_chunk(tmp_path: Path) -> None:
    header = small_header(full=False)
    first = ArrayTrace(header, [small_rows(header)])

    second = TraceReader(write_trace(first, tmp_path / "t.parquet"))

    assert [plain(b) for b in ArrayTrace.of(second).batches()] == [
        plain(b) for b in first.batches()
    ]


def test_a_file_by_another_writer_with_larger_lists_of_metadata_is_read(tmp_path: Path) -> None:
    header = small_header(full=False)
    rows = small_rows(header)
    table = pa.Table.from_batches([rows.to_arrow(header)])
    extra = table.append_column("token_id", pa.array([0] * len(rows)))
    pq.write_table(extra, tmp_path / "t.parquet", row_group_size=11, compression="none")

    assert TraceReader(tmp_path / "t.parquet").validate() == len(rows)


def peak(path: Path) -> int:
    """Return the most bytes of Python objects and Arrow buffers held while reading *path*."""
    gc.collect()
    most = 0
    start = pa.total_allocated_bytes()
    tracemalloc.start()
    for i, _ in enumerate(TraceReader(path).batches()):
        if not i % 100:
            most = max(most, pa.total_allocated_bytes() - start)
    _, traced = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most + traced


@pytest.mark.slow
def test_memory_stays_flat_however_long_the_trace(tmp_path: Path) -> None:
    geometry = Geometry(name="g", n_experts=64, top_k=8, moe_layers=list(range(16)))
    peaks, written = [], []
    for tokens in (2_000, 8_000):
        source = Synthetic(geometry, tokens=tokens, reuse=0)
        path = tmp_path / f"{tokens}.parquet"
        tracemalloc.start()
        with TraceWriter(path, source.header, rows_per_group=4096) as writer:
            for chunk in source.columns():
                writer.add_columns(chunk)
        written.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        peaks.append(peak(path))

    assert peaks[1] < 1.2 * peaks[0]
    assert written[1] < 1.2 * written[0]


@pytest.mark.benchmark
def test_a_decode_batch_costs_about_a_microsecond(tmp_path: Path) -> None:
    import time

    geometry = Geometry(name="g", n_experts=128, top_k=8, moe_layers=list(range(48)))
    path = Synthetic(geometry, tokens=2000).write(tmp_path / "t.parquet")
    best = np.inf
    for _ in range(5):
        start = time.perf_counter()
        n = sum(1 for _ in TraceReader(path).batches())
        best = min(best, (time.perf_counter() - start) / n)

    assert best < 3e-6


def test_the_header_may_say_anything_a_header_can(tmp_path: Path) -> None:
    header = Header(
        geometry=Geometry(name="g", n_experts=2, top_k=1, moe_layers=[0]),
        weights="q4_k_m",
        expert_bytes={"q4_k_m": [10]},
        slice_bytes={"q4_k_m": [[6, 4]]},
        dense_bytes=[99],
        dense_layer_bytes=[1, 2],
        unknown=["scores"],
        provenance=Provenance(kind="imported", model="m", versions={"a": "1"}),
    )
    with TraceWriter(tmp_path / "t.parquet", header) as writer:
        writer.add(request=0, phase=1, step=0, position=4, moe_layer=0, experts=[[1]])
    reader = TraceReader(tmp_path / "t.parquet")

    assert reader.header == header
    assert list(reader.batches()) == [
        LayerBatch(step=0, phase=1, layer=0, n_tokens=1, context=5, experts=[1], requests=[0])
    ]
