"""Tests of importing JSON lines of decode routing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moetier.traces.batch import DECODE
from moetier.traces.errors import InputError
from moetier.traces.importers.jsonl_layers import import_jsonl_layers
from moetier.traces.io import TraceReader

LINE = '{"tok": 1, "layers": [[0, 3], [1, 2]]}\n'


def imported(tmp_path: Path, text: str, **options: Any) -> TraceReader:
    source = tmp_path / "some.jsonl"
    source.write_text(text)
    import_jsonl_layers(source, tmp_path / "t.parquet", **options)
    reader = TraceReader(tmp_path / "t.parquet")
    reader.validate()
    return reader


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(data=st.data(), layers=st.integers(1, 3), tokens=st.integers(1, 6), k=st.integers(1, 4))
def test_every_id_of_every_layer_arrives(
    tmp_path: Path, data: st.DataObject, layers: int, tokens: int, k: int
) -> None:
    ids = st.lists(st.integers(0, 9), min_size=k, max_size=k, unique=True)
    lists = data.draw(
        st.lists(st.lists(ids, min_size=layers, max_size=layers), min_size=tokens, max_size=tokens)
    )
    lines = [json.dumps({"tok": 5 + i, "layers": token}) for i, token in enumerate(lists)]
    batches = list(imported(tmp_path, "\n".join(lines)).batches())

    assert [b.experts for b in batches] == [row for token in lists for row in token]
    assert [b.step for b in batches] == [i for i in range(tokens) for _ in range(layers)]
    assert [b.context for b in batches] == [6 + i for i in range(tokens) for _ in range(layers)]
    assert {(b.phase, b.n_tokens, b.weights) for b in batches} == {(DECODE, 1, None)}


def test_what_the_format_does_not_say_is_unknown(tmp_path: Path) -> None:
    header = imported(tmp_path, LINE).header

    assert (header.geometry.name, header.geometry.n_experts, header.geometry.top_k) == (
        "some",
        4,
        2,
    )
    assert header.provenance.kind == "imported"
    assert header.provenance.importer == "jsonl-layers"
    assert {"weights", "scores", "prompt", "model", "n_experts", "geometry.hidden"} <= set(
        header.unknown
    )


def test_the_number_of_experts_can_be_told(tmp_path: Path) -> None:
    header = imported(tmp_path, LINE, n_experts=16).header

    assert header.geometry.n_experts == 16
    assert "n_experts" not in header.unknown


def test_short_lists_are_padded_and_blank_lines_skipped(tmp_path: Path) -> None:
    text = LINE + '\n{"tok": 2, "layers": [[2], [1, 0]], "more": 1}\n'
    batches = list(imported(tmp_path, text).batches())

    assert [b.experts for b in batches] == [[0, 3], [1, 2], [2], [1, 0]]


def test_many_tokens_are_written_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moetier.traces.importers.jsonl_layers.TOKENS", 3)
    steps = [b.step for b in imported(tmp_path, LINE * 8).batches()]

    assert steps == [i for i in range(8) for _ in range(2)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "no keys 'tok' and 'layers'"),
        ('{"tok": 1}', "no keys 'tok' and 'layers'"),
        ('{"tok": -1, "layers": [[1]]}', "tok -1 is not a token number"),
        ('{"tok": true, "layers": [[1]]}', "tok True is not a token number"),
        ('{"tok": 1, "layers": []}', "'layers' is not a list of lists"),
        ('{"tok": 1, "layers": [3, 4]}', "layer 0 is 3, not a list"),
        ('{"tok": 1, "layers": [[1, 2], [1.5]]}', "layer 1: 1.5 is not an expert id"),
        ('{"tok": 1, "layers": [[-1], [2]]}', "layer 0: -1 is not an expert id"),
        ('{"tok": 1, "layers": [[40000], [2]]}', "layer 0: 40000 is not an expert id"),
        ('{"tok": 1, "layers": [[7, 7], [2]]}', r"layer 0: an expert appears twice in \[7, 7\]"),
        ('{"tok": 1, "layers": [[7, 8]]}', "1 layers, the lines before have 2"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(InputError, match=rf"some\.jsonl: line 3: {words}"):
        imported(tmp_path, LINE + "\n" + line + "\n" + LINE)

    assert not (tmp_path / "t.parquet").exists()


@pytest.mark.parametrize(
    ("text", "words"), [("\n", "no tokens"), ('{"tok": 1, "layers": [[]]}', "no expert ids")]
)
def test_a_file_without_routing_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        imported(tmp_path, text)


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="model 'olmoe-1b-7b' does not fit the trace: its MoE"):
        imported(tmp_path, LINE, model="olmoe-1b-7b")
    with pytest.raises(InputError, match="expert 3 occurs, but there are 3 experts"):
        imported(tmp_path, LINE, n_experts=3)


def test_the_real_trace_of_olmoe(data: Path, tmp_path: Path) -> None:
    source = data / "olmoe-1b-7b" / "trace.jsonl"
    header = import_jsonl_layers(source, tmp_path / "t.parquet", model="olmoe-1b-7b")
    reader = TraceReader(tmp_path / "t.parquet")
    reader.validate()

    assert reader.n_rows == 299 * 16
    assert (header.geometry.name, header.geometry.top_k) == ("olmoe-1b-7b", 8)
    assert "model" not in header.unknown
    first = json.loads(source.read_text().splitlines()[0])["layers"]
    assert [b.experts for b in list(reader.batches())[:16]] == first
