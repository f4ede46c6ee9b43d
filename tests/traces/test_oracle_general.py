"""Tests of traces written for libCacheSim."""

from __future__ import annotations

import struct
from collections import OrderedDict
from fractions import Fraction
from itertools import groupby
from pathlib import Path

import pytest

from moetier.sim.hardware import load_profile
from moetier.sim.run import Setting, simulate
from moetier.traces.batch import DECODE
from moetier.traces.columns import Columns
from moetier.traces.errors import InputError
from moetier.traces.io import ArrayTrace, TraceReader
from moetier.traces.oracle_general import RECORD, export_oracle_general
from moetier.traces.samples import moe_tiny_path
from moetier.traces.schema import Header
from moetier.traces.testing import small_header, small_rows

SIZES = [100, 200, 300]


def parsed(path: Path) -> list[tuple[int, int, int, int]]:
    """Return the records as the format's own description reads them."""
    return list(struct.iter_unpack("<IQIq", path.read_bytes()))


def sized_header() -> Header:
    return small_header().model_copy(update={"weights": "x", "expert_bytes": {"x": SIZES}})


def cut(rows: Columns, at: int) -> list[Columns]:
    return [rows.take(slice(i, i + at)) for i in range(0, len(rows), at)]


@pytest.mark.parametrize("at", [1, 2, 7, 1000])
def test_the_bytes_read_back_to_the_requests_of_the_batches(tmp_path: Path, at: int) -> None:
    header = sized_header()
    rows = small_rows(header, padding=0.2, invalid=0.2)
    source = ArrayTrace(header, cut(rows, at))
    n = export_oracle_general(source, tmp_path / "t.bin")
    wanted = [
        (b.step, b.layer * 8 + expert, SIZES[b.layer])
        for b in source.batches()
        for expert in dict.fromkeys(b.experts)
    ]
    records = parsed(tmp_path / "t.bin")

    assert RECORD.itemsize == 24
    assert [record[:3] for record in records] == wanted
    assert n == len(wanted)
    for i, (_, obj, _, following) in enumerate(records):
        later = (j + 1 for j in range(i + 1, n) if records[j][1] == obj)
        assert following == next(later, -1)


def lru_misses(records: list[tuple[int, int, int, int]], slots: int, batches: bool) -> float:
    """Return the byte miss ratio of a plain LRU of *slots* experts over *records*.

    With *batches* the requests of one step and layer come together, as they do in the simulator:
    looked up first, then brought and refreshed, and only then is anything evicted. Without, as
    libCacheSim does, each request evicts on its own.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    missed = 0
    for _, group in groupby(records, lambda r: (r[0], r[1] // 32) if batches else object()):
        asked = list(group)
        missed += sum(size for _, obj, size, _ in asked if obj not in cache)
        for _, obj, _, _ in asked:
            cache[obj] = None
            cache.move_to_end(obj)
        while len(cache) > slots:
            cache.popitem(last=False)
    return missed / sum(size for _, _, size, _ in records)


def test_lru_over_the_file_misses_the_bytes_that_the_simulator_misses(tmp_path: Path) -> None:
    whole = TraceReader(moe_tiny_path().parent / "moe-tiny.parquet")
    chunks = [chunk.take(chunk.phase == DECODE) for chunk in whole.columns()]
    source = ArrayTrace(whole.header, [chunk for chunk in chunks if len(chunk)])
    export_oracle_general(source, tmp_path / "t.bin", "bf16")
    records = parsed(tmp_path / "t.bin")
    geometry = whole.header.geometry
    setting = Setting(
        profile=load_profile("phone-ufs4"),
        policy={"eviction": "lru"},
        capacity={"dram": Fraction(1, 4)},
        weights="bf16",
    )
    result = simulate(source, setting).metrics["byte_miss_rate"]
    slots = geometry.n_moe_layers * geometry.n_experts // 4

    assert max(b.n_tokens for b in source.batches()) == 1
    assert result == lru_misses(records, slots, batches=True)
    # one by one, a request may evict what the same layer asks for next
    assert result < lru_misses(records, slots, batches=False) < result + 0.01


def test_an_expert_too_large_for_the_format_is_refused(tmp_path: Path) -> None:
    header = small_header().model_copy(update={"expert_bytes": {"x": [1 << 32] * 3}})
    source = ArrayTrace(header, [small_rows(header)])
    with pytest.raises(InputError, match="4294967296 bytes; the format holds up to 4294967295"):
        export_oracle_general(source, tmp_path / "t.bin", "x")

    assert not (tmp_path / "t.bin").exists()


def test_unknown_bytes_are_refused(tmp_path: Path) -> None:
    header = small_header()
    with pytest.raises(InputError, match="size of an expert"):
        export_oracle_general(ArrayTrace(header, [small_rows(header)]), tmp_path / "t.bin")
