"""Tests of the numbers that describe a source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moetier.traces.columns import build
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry, load_geometry
from moetier.traces.importers import IMPORTERS
from moetier.traces.info import Demand, describe
from moetier.traces.io import ArrayTrace, TraceReader
from moetier.traces.schema import Header, Provenance
from moetier.traces.synthetic import Synthetic

GEOMETRY = Geometry(name="g", n_experts=8, top_k=2, moe_layers=[0, 1])
HEADER = Header(
    geometry=GEOMETRY,
    weights="q4_0",
    expert_bytes={"q4_0": [100, 1000]},
    unknown=["scores"],
    provenance=Provenance(kind="imported", model="Real-Model"),
)


def trace(
    rows: list[tuple[int, int, int, int, int, list[int]]], header: Header = HEADER
) -> ArrayTrace:
    request, phase, step, position, layer, experts = zip(*rows, strict=True)
    columns = build(
        header, request=request, phase=phase, step=step, position=position, moe_layer=layer,
        experts=experts,
    )  # fmt: skip
    return ArrayTrace(header, [columns])


BY_HAND = trace(
    [
        (0, 0, 0, 0, 0, [1, 2]),
        (0, 0, 0, 1, 0, [2, 3]),
        (0, 0, 0, 1, 1, [4, 5]),  # the last layer sees the last token only
        (0, 1, 1, 2, 0, [3, 6]),
        (0, 1, 1, 2, 1, [5, 4]),
        (0, 1, 2, 3, 0, [3, -1]),
        (0, 1, 2, 3, 1, [4, 7]),
    ]
)


def test_every_number_by_hand() -> None:
    info = describe(BY_HAND)

    assert (info.model, info.kind, info.weights) == ("Real-Model", "imported", "q4_0")
    assert (info.requests, info.steps, info.prefill_steps, info.decode_steps) == (1, 3, 1, 2)
    assert (info.prefill_tokens, info.decode_tokens) == (2, 2)
    assert (info.entries, info.lookups) == (13, 12)
    assert info.reuse == (1 + 2 + 1 + 1) / 7  # of 2, 2, 1 and 2 experts
    assert info.reuse_by_chance == 0.25
    assert info.prefill_step == Demand(5.0, 5, 2300.0, 2300, 3, 2000)
    assert info.decode_step == Demand(3.5, 4, 2150.0, 2200, 2, 2000)
    assert info.all_bytes == 8 * 1100
    assert (info.compulsory_misses, info.compulsory_bytes) == (7, 4 * 100 + 3 * 1000)
    assert (info.unknown, info.warnings) == (["scores"], [])


def test_bytes_follow_the_format_asked_for() -> None:
    sized = HEADER.model_copy(update={"geometry": load_geometry("moe-tiny"), "expert_bytes": {}})
    source = Synthetic(sized.geometry, tokens=3)

    assert describe(source).all_bytes == 8 * 32 * 3 * 128 * 128 * 2
    assert describe(source, "int8").all_bytes == 8 * 32 * 3 * 128 * 128


def test_unknown_sizes_leave_bytes_out_and_do_not_stop_the_rest() -> None:
    header = HEADER.model_copy(update={"expert_bytes": {}, "weights": None})
    source = trace([(0, 1, 0, 0, 0, [1, 2])], header)
    info = describe(source)

    assert (info.weights, info.all_bytes, info.compulsory_bytes) == (None, None, None)
    assert info.decode_step == Demand(2.0, 2, None, None, 2, None)
    assert (info.prefill_step, info.reuse) == (None, None)
    with pytest.raises(InputError, match="the size of an expert of 'g' is unknown"):
        describe(source, "bf16")


def test_lockstep_counts_the_union_of_requests() -> None:
    rows = [
        (r, 1, step, step, 0, ids) for step in range(2) for r, ids in ((0, [1, 2]), (1, [2, 3]))
    ]
    info = describe(trace(rows))

    assert (info.requests, info.decode_tokens, info.entries, info.lookups) == (2, 4, 8, 6)
    assert info.decode_step is not None
    assert info.decode_step.slices_max == 3
    assert info.reuse == 1.0


def test_a_described_source_is_plain_json() -> None:
    copy = json.loads(json.dumps(describe(BY_HAND).as_dict()))

    assert copy["decode_step"]["bytes_max"] == 2200
    assert copy["warnings"] == []


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([0, 0, 0], "looks padded: 40 rows have only zeros"),
        ([0, 1, 2], "looks padded: 40 of 40 rows are exactly 0 to 2 in that order"),
    ],
)
def test_padding_taken_for_routing_is_told(ids: list[int], words: str) -> None:
    geometry = Geometry(name="g", n_experts=8, top_k=3, moe_layers=[0])
    header = Header(geometry=geometry, provenance=Provenance(kind="imported"))
    warnings = describe(trace([(0, 1, i, i, 0, ids) for i in range(40)], header)).warnings

    assert len(warnings) == 1
    assert warnings[0].startswith(words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"skew": 0, "reuse": 0}, ["looks uniform: experts are equally popular and reuse is what"]),
        ({"skew": 0, "reuse": 0, "tokens": 20}, []),  # too few to tell
        ({"skew": 1, "reuse": 0}, []),
        ({"skew": 0, "reuse": 0.6}, []),
    ],
)
def test_uniform_routing_is_told(arguments: dict[str, Any], words: list[str]) -> None:
    geometry = Geometry(name="g", n_experts=64, top_k=4, moe_layers=list(range(12)))
    warnings = describe(Synthetic(geometry, **{"tokens": 400, **arguments})).warnings

    assert [text[: len(word)] for text, word in zip(warnings, words, strict=True)] == words


def test_real_traces_look_real(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    source = data / "phone-qwen3-30b-a3b" / "route.csv"
    IMPORTERS.create("bigmoeonedge", {"source": source, "out": out})
    phone = describe(TraceReader(out))
    IMPORTERS.create("jsonl-layers", {"source": data / "olmoe-1b-7b" / "trace.jsonl", "out": out})
    olmoe = describe(TraceReader(out))

    assert phone.warnings == olmoe.warnings == []
    assert (phone.prefill_tokens, phone.decode_tokens, olmoe.decode_tokens) == (28, 128, 299)
    assert phone.decode_step is not None
    assert phone.decode_step.bytes_max == 822_804_480  # one token; LRU below it never hits
    assert phone.reuse == pytest.approx(0.379, abs=0.001)
    assert olmoe.reuse == pytest.approx(0.435, abs=0.001)


def test_reuse_of_uneven_tokens_in_lockstep() -> None:
    rows = [
        (0, 1, 0, 0, 0, [1, 2]),
        (1, 1, 0, 0, 0, [3, -1]),
        (0, 1, 1, 1, 0, [1, 3]),
        (1, 1, 1, 1, 0, [3, -1]),
    ]
    info = describe(trace(rows))

    assert info.reuse == 2 / 3  # 1 of request 0's two, request 1's only one
    assert info.lookups == 5
