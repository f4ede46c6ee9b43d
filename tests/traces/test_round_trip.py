"""Tests that a trace goes through import, file and export without losing anything."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from moetier.traces.batch import PHASES, Source
from moetier.traces.export import export
from moetier.traces.importers import IMPORTERS
from moetier.traces.info import describe
from moetier.traces.io import ArrayTrace, TraceReader, write_trace
from moetier.traces.synthetic import Synthetic, shuffled
from moetier.traces.testing import small_header, small_rows


def test_every_line_of_a_real_trace_comes_out_again(data: Path, tmp_path: Path) -> None:
    source = data / "phone-qwen3-30b-a3b" / "route.csv"
    IMPORTERS.create("bigmoeonedge", {"source": source, "out": tmp_path / "t.parquet"})
    export(TraceReader(tmp_path / "t.parquet"), tmp_path / "out.csv")
    with source.open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    with (tmp_path / "out.csv").open() as file:
        out = list(csv.DictReader(file))

    expected = {
        (PHASES[int(r["phase"])], int(r["step"]), int(r["layer"]), int(r["slot"])): (
            int(r["expert"]),
            np.float32(r["weight"]),
            int(r["residency"]),
        )
        for r in rows
    }
    found = {
        (r["phase"], int(r["position"]), int(r["layer"]), int(r["slot"])): (
            int(r["expert"]),
            np.float32(r["weight"]),
            int(r["recorded"]),
        )
        for r in out
    }
    assert found == expected
    assert len(out) == len(rows)


@pytest.mark.parametrize("kind", ["reader", "array", "synthetic", "shuffled"])
def test_all_sources_keep_the_contract_of_a_source(kind: str, tmp_path: Path) -> None:
    header = small_header()
    array = ArrayTrace(header, [small_rows(header, padding=0.2, invalid=0.1)])
    synthetic = Synthetic(header.geometry, prompt=4, tokens=6, requests=2)
    made: dict[str, Source] = {
        "reader": TraceReader(write_trace(array, tmp_path / "t.parquet"), with_scores=True),
        "array": array,
        "synthetic": synthetic,
        "shuffled": shuffled(synthetic),
    }
    source = made[kind]
    batches = list(source.batches())
    again = list(source.batches())
    n_layers = source.header.geometry.n_moe_layers

    order = [(batch.step, batch.layer) for batch in batches]
    assert order == sorted(set(order))
    assert [(b.step, b.layer, b.experts) for b in again] == [
        (b.step, b.layer, b.experts) for b in batches
    ]
    for batch in batches:
        assert 0 <= batch.layer < n_layers
        assert all(0 <= expert < source.header.geometry.n_experts for expert in batch.experts)
        assert len(batch.token_ids()) == len(batch.experts)
        assert batch.requests is not None
        assert len(batch.requests) == batch.n_tokens > 0
        assert batch.context >= batch.n_tokens
        assert batch.weights is None or batch.weights.shape == (len(batch.experts),)
        assert batch.recorded is None or len(batch.recorded) == len(batch.experts)
        assert batch.scores is None or batch.scores.shape == (batch.n_tokens, 8)
    assert describe(source).entries == sum(len(batch.experts) for batch in batches)


def test_a_capture_may_write_layer_by_layer_with_numpy_scalars(tmp_path: Path) -> None:
    from moetier.traces.io import TraceWriter

    header = small_header(full=False)
    with TraceWriter(tmp_path / "t.parquet", header) as writer:
        for layer in range(3):
            writer.add(
                request=np.array([0, 0]),
                phase=np.int8(0),
                step=0,
                position=np.arange(2),
                moe_layer=layer,
                experts=np.array([[0, 1, 2], [3, 4, 5]], np.int64),
                weights=np.array([[0.5, 0.3, 0.2], [np.nan] * 3], np.float64),
                valid=[True, False],
            )
    batches = list(TraceReader(tmp_path / "t.parquet").batches())

    assert [batch.experts for batch in batches] == [[0, 1, 2]] * 3
    assert [batch.n_tokens for batch in batches] == [1, 1, 1]
    assert batches[0].weights is not None  # the row without weights is not valid
