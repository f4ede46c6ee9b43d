"""Tests of importing FLAME-MoE traces, in folders of their shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moetier.traces.batch import DECODE, PREFILL
from moetier.traces.errors import InputError
from moetier.traces.importers.flame import import_flame
from moetier.traces.io import TraceReader

K, TOKENS = 6, 10


def write(folder: Path, number: int, tokens: int = TOKENS, **more: Any) -> Any:
    draw = np.random.Generator(np.random.PCG64(number))
    ids = draw.random((tokens, 64)).argsort(axis=1)[:, :K].astype(np.int16)
    scores = -np.sort(-draw.random((tokens, K)), axis=1).astype(np.float16)
    table = pa.table(
        {
            "scores": pa.array(scores.tolist(), pa.list_(pa.float16())),
            "indices": pa.array(ids.tolist(), pa.list_(pa.int16())),
        }
        | more
    )
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / f"layer_{number:02d}.parquet", row_group_size=4)
    return ids, scores.astype(np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "flame-moe-290m" / "actives" / "iter_5473"


def imported(source: Path, tmp_path: Path, **options: Any) -> TraceReader:
    import_flame(source, tmp_path / "t.parquet", **options)
    reader = TraceReader(tmp_path / "t.parquet")
    reader.validate()
    return reader


def test_every_sequence_is_a_request_and_layers_count_from_one(
    folder: Path, tmp_path: Path
) -> None:
    ids, scores = write(folder, 2)
    write(folder, 3)
    reader = imported(folder, tmp_path, sequence=4)
    batches = [b for b in reader.batches() if b.layer == 0]

    assert reader.header.geometry.moe_layers == [1, 2]
    assert reader.header.geometry.name == "flame-moe-290m"
    assert [(b.phase, b.n_tokens, (b.requests or [])[0]) for b in batches] == [
        (PREFILL, 4, 0),
        (PREFILL, 4, 1),
        (PREFILL, 2, 2),
    ]
    assert [e for b in batches for e in b.experts] == ids.ravel().tolist()
    assert batches[1].weights is not None
    np.testing.assert_array_equal(batches[1].weights, scores[4:8].ravel())


def test_it_can_be_replayed_as_decode_and_cut(folder: Path, tmp_path: Path) -> None:
    ids, _ = write(folder, 2)
    write(folder, 3)
    file = folder / "layer_02.parquet"
    batches = list(imported(file, tmp_path, phase="decode", sequence=4, tokens=5).batches())

    assert [(b.phase, b.step) for b in batches[::2]] == [(DECODE, i) for i in range(5)]
    assert [b.context for b in batches[::2]] == [1, 2, 3, 4, 1]
    assert batches[8].experts == ids[4].tolist()


def test_what_is_not_said_is_unknown(folder: Path, tmp_path: Path) -> None:
    write(folder, 2)
    header = imported(folder, tmp_path).header

    assert {"sequence", "ends of texts", "norm_topk", "scores"} <= set(header.unknown)
    assert "sequence" not in imported(folder, tmp_path, sequence=8).header.unknown


def test_a_missing_layer_is_named(folder: Path, tmp_path: Path) -> None:
    write(folder, 2)
    write(folder, 4)
    with pytest.raises(InputError, match=r"layer_03\.parquet is missing; fetch it too"):
        imported(folder, tmp_path)


def test_layers_of_other_lengths_are_refused(folder: Path, tmp_path: Path) -> None:
    write(folder, 2)
    write(folder, 3, tokens=9)
    with pytest.raises(InputError, match=r"layers have \[9, 10\] tokens"):
        imported(folder, tmp_path)


def test_an_empty_folder_and_a_strange_column_are_refused(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(parents=True)
    with pytest.raises(InputError, match=r"no layer_01\.parquet or later"):
        imported(folder, tmp_path)
    pq.write_table(pa.table({"token_id": [1]}), folder / "layer_02.parquet")
    with pytest.raises(InputError, match=r"no column 'scores' \(found: token_id\)"):
        imported(folder, tmp_path)


def test_ragged_rows_are_refused(folder: Path, tmp_path: Path) -> None:
    ragged = pa.array([[1] * (6 - (i == 3)) for i in range(TOKENS)], pa.list_(pa.int16()))
    write(folder, 2, indices=ragged)
    with pytest.raises(InputError, match=r"column 'indices': tokens of \[5, 6\] experts"):
        imported(folder, tmp_path)
