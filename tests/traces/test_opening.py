"""Tests of opening a file that may not be a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moetier.traces.errors import InputError
from moetier.traces.io import TraceReader, TraceWriter
from moetier.traces.opening import open_trace
from moetier.traces.schema import HEADER_KEY
from moetier.traces.testing import small_header, small_rows


@pytest.fixture
def path(tmp_path: Path) -> Path:
    header = small_header(full=False)
    with TraceWriter(tmp_path / "t.parquet", header) as writer:
        writer.add_columns(small_rows(header))
    return tmp_path / "t.parquet"


def rewrite(path: Path, change: Any) -> None:
    """Apply *change* to the header of the trace at *path*, as JSON."""
    table = pq.read_table(path)
    header = json.loads(table.schema.metadata[HEADER_KEY])
    change(header)
    text = json.dumps(header).encode()
    pq.write_table(table.replace_schema_metadata({HEADER_KEY: text}), path)


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        open_trace(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def test_a_trace_gives_header_and_number_of_rows(path: Path) -> None:
    assert open_trace(path) == (small_header(full=False), 42)


def test_a_missing_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.parquet") == "no such file; name a trace (.parquet)"
    assert refusal(tmp_path).startswith("is a directory")


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_bytes(b"")

    assert refusal(tmp_path / "t.parquet").startswith("the file is empty (0 bytes); capture")


def test_another_kind_of_file_points_to_convert(tmp_path: Path) -> None:
    (tmp_path / "route.csv").write_text("turn,phase,step")

    assert refusal(tmp_path / "route.csv") == (
        "not a Parquet file (it starts with b'turn'); `moetier trace convert` reads other formats"
    )


@pytest.mark.parametrize("kept", [5, 100, 2000, -1])
def test_a_truncated_file(path: Path, kept: int) -> None:
    content = path.read_bytes()
    size = kept % len(content)
    path.write_bytes(content[:size])

    assert refusal(path).startswith(f"truncated after {size} bytes: no footer; capture")


def test_a_damaged_footer(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-200:-20] = b"\xff" * 180
    path.write_bytes(content)

    assert refusal(path).startswith("damaged Parquet footer (")


def test_a_parquet_file_that_is_no_trace(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "t.parquet")

    assert refusal(tmp_path / "t.parquet").startswith("Parquet, but not a trace: its metadata has")


def test_a_trace_without_rows(path: Path) -> None:
    pq.write_table(pq.read_table(path).slice(0, 0), path)

    assert refusal(path).startswith("the trace has no rows; capture")


def test_another_version(path: Path) -> None:
    rewrite(path, lambda header: header.update(version=2))

    assert refusal(path).startswith("trace version 2, this moetier reads version 1; ")


def test_another_version_whose_header_is_not_known(path: Path) -> None:
    rewrite(path, lambda header: header.update(version=2, colour="red"))

    assert refusal(path).startswith("trace version 2, this moetier reads version 1; ")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda header: header.update(colour="red"),
            "header, key 'colour': Extra inputs are not permitted, got 'red'",
        ),
        (
            lambda header: header["geometry"].update(top_k=0),
            "header, key 'geometry.top_k': Input should be greater than or equal to 1, got 0",
        ),
        (
            lambda header: header.update(expert_bytes={"bf16": [1]}),
            "header, key 'expert_bytes.bf16' has 1 layers, the geometry 3",
        ),
        (
            lambda header: header.update(slice_bytes={"bf16": [[1]] * 4}),
            "header, key 'slice_bytes.bf16' has 4 layers, the geometry 3",
        ),
        (
            lambda header: header.update(dense_bytes=[1, 2]),
            "header, key 'dense_bytes' has 2 layers, the geometry 3",
        ),
        (lambda header: header.update(score_kind="logits"), "column 'scores' is missing"),
        (
            lambda header: header["geometry"].update(top_k=2),
            "column 'experts' is fixed_size_list<element: int16>[3], expected "
            "fixed_size_list<item: int16>[2]",
        ),
    ],
)
def test_a_header_that_does_not_fit_names_the_key(path: Path, change: Any, words: str) -> None:
    rewrite(path, change)

    assert refusal(path).startswith(words)


@pytest.mark.parametrize("text", [b"{", b"[]", b"null"])
def test_a_header_that_is_no_object(path: Path, text: bytes) -> None:
    pq.write_table(pq.read_table(path).replace_schema_metadata({HEADER_KEY: text}), path)

    assert refusal(path).startswith("header, key ''")


def test_the_reader_refuses_on_opening(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match="truncated"):
        TraceReader(path)
