"""Tests of importing what SGLang records, in files of its shapes."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetier.traces.batch import DECODE, PREFILL
from moetier.traces.errors import InputError
from moetier.traces.importers.sglang import import_sglang
from moetier.traces.io import TraceReader

LAYERS, K, EXPERTS = 3, 2, 8  # layer 0 has no experts


def ids_of(tokens: int, seed: int = 0) -> Any:
    """Return (layers, tokens, 8) as the recorder keeps it."""
    draw = np.random.Generator(np.random.PCG64(seed))
    ids = np.full((LAYERS, tokens, 8), -1, np.int32)
    ids[1:, :, :K] = draw.random((LAYERS - 1, tokens, EXPERTS)).argsort(axis=2)[..., :K]
    return ids


def record(
    number: int, mode: Any, positions: list[int], lengths: list[int] | None = None, **more: Any
) -> dict[str, Any]:
    fields = {
        "topk_ids_of_layer": ids_of(len(positions), number),
        "positions": positions,
        "forward_mode": mode,
        "forward_pass_id": number,
        "rank": 0,
        "extend_seq_lens": lengths or [],
    } | more
    return {f"records/{number}/{key}": value for key, value in fields.items()}


def imported(tmp_path: Path, *records: dict[str, Any], **options: Any) -> TraceReader:
    arrays = {key: value for item in records for key, value in item.items()}
    np.savez(tmp_path / "r.npz", **arrays)
    import_sglang(tmp_path / "r.npz", tmp_path / "t.parquet", **options)
    reader = TraceReader(tmp_path / "t.parquet")
    reader.validate()
    return reader


def test_passes_become_steps_and_layers_without_experts_are_left_out(tmp_path: Path) -> None:
    reader = imported(tmp_path, record(0, 1, [0, 1, 2], [3]), record(1, 2, [3]))
    batches, ids = list(reader.batches()), ids_of(3)

    assert reader.header.geometry.moe_layers == [1, 2]
    assert reader.header.geometry.n_layers == LAYERS
    assert reader.header.geometry.top_k == K
    assert [(b.phase, b.step, b.n_tokens) for b in batches[::2]] == [
        (PREFILL, 0, 3),
        (DECODE, 1, 1),
    ]
    assert batches[0].experts == ids[1, :, :K].ravel().tolist()
    assert {"weights", "requests", "model", "n_experts"} <= set(reader.header.unknown)


def test_requests_are_found_by_their_positions(tmp_path: Path) -> None:
    reader = imported(
        tmp_path,
        record(0, "EXTEND", [0, 1, 0, 1], [2, 2]),  # two prompts of the same length
        record(1, "ForwardMode.DECODE", [2, 2]),
        record(2, 1, [0, 1, 2], [3]),  # the first chunk of a third
        record(3, 1, [3, 4], [2]),  # and its second
        record(4, 2, [3, 5, 3]),
    )
    requests = [b.requests for b in reader.batches() if b.layer == 0]

    assert requests == [[0, 0, 1, 1], [0, 1], [2, 2, 2], [2, 2], [0, 2, 1]]


def test_a_mixed_pass_is_a_prefill_and_a_decode_step(tmp_path: Path) -> None:
    reader = imported(tmp_path, record(0, 1, [0, 1], [2]), record(1, 3, [2, 0, 1], [1, 2]))
    batches = [b for b in reader.batches() if b.layer == 0]

    assert [(b.phase, b.requests) for b in batches] == [
        (PREFILL, [0, 0]),
        (PREFILL, [1, 1]),
        (DECODE, [0]),
    ]


def test_padding_of_a_graph_and_padded_tokens_reach_no_batch(tmp_path: Path) -> None:
    wide = ids_of(4, 1)
    wide[:, 1] = -1
    reader = imported(
        tmp_path,
        record(0, 1, [0, 1], [2]),
        record(1, 2, [2, 7], topk_ids_of_layer=wide),
    )

    assert [b.n_tokens for b in reader.batches()] == [2, 2, 1, 1]


def test_physical_ids_become_logical(tmp_path: Path) -> None:
    table = np.tile(np.arange(EXPERTS)[::-1], (LAYERS, 1))
    reader = imported(
        tmp_path, record(0, 2, [4]), {"last_physical_to_logical_map": table}, n_experts=EXPERTS
    )

    assert next(iter(reader.batches())).experts == (7 - ids_of(1)[1, 0, :K]).tolist()


def test_one_rank_is_picked(tmp_path: Path) -> None:
    records = record(0, 2, [4], rank=0), record(1, 2, [4], rank=1)
    with pytest.raises(InputError, match=r"ranks \[0, 1\] recorded.*--option rank=0"):
        imported(tmp_path, *records)

    assert len(list(imported(tmp_path, *records, rank=1).batches())) == 2


@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        ({"logical_count": np.zeros((1, 2, 3))}, {}, "counts of experts, which cannot be replayed"),
        ({"a": np.zeros(3)}, {}, r"no keys 'records/N/...' \(found: a\)"),
        ({"records/0/positions": [0]}, {}, "records/0: no key 'topk_ids_of_layer'"),
        (record(0, 9, [0]), {}, "forward_mode 9; known: extend, decode, mixed"),
        (record(0, 1, [0, 1], [3]), {}, r"2 positions, extend_seq_lens \[3\]"),
        (record(0, 2, [3]), {"model": "mixtral-8x7b", "top_k": 1}, "up to 2 ids, the model top-1"),
        (record(0, 2, [3]), {"top_k": 10}, "top-10, but the recorder keeps 8"),
        (record(0, 2, [3]), {"n_experts": 3}, "but there are 3 experts; ids are physical"),
    ],
)
def test_bad_recordings_are_named(
    tmp_path: Path, records: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        imported(tmp_path, records, **options)


def test_a_pickle_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "r.pt").write_bytes(b"PK")
    with pytest.raises(InputError, match=r"nothing is unpickled here; .*docs/formats\.md"):
        import_sglang(tmp_path / "r.pt", tmp_path / "t.parquet")


def response(dtype: str, tokens: int, **more: Any) -> dict[str, Any]:
    ids = ids_of(tokens).transpose(1, 0, 2)[..., :K].copy()
    ids[:, 0] = 0  # a layer without experts was never written
    text = base64.b64encode(ids.astype(dtype).tobytes()).decode()
    return {
        "meta_info": {"routed_experts": text, "prompt_tokens": 3, "completion_tokens": 2} | more
    }


@pytest.mark.parametrize("dtype", ["int32", "uint16", "uint8"])
def test_responses_carry_bare_ids_of_all_layers(tmp_path: Path, dtype: str) -> None:
    source = tmp_path / "r.jsonl"
    more = {} if dtype == "int32" else {"routed_experts_dtype": dtype}
    source.write_text(json.dumps(response(dtype, 4, **more)))
    import_sglang(source, tmp_path / "t.parquet", n_layers=LAYERS, top_k=K)
    reader = TraceReader(tmp_path / "t.parquet")
    reader.validate()

    assert reader.header.geometry.moe_layers == [1, 2]
    assert [(b.phase, b.n_tokens) for b in reader.batches()] == [(PREFILL, 3)] * 2 + [
        (DECODE, 1)
    ] * 2
    assert list(reader.batches())[-1].experts == ids_of(4)[2, 3, :K].tolist()


@pytest.mark.parametrize(
    ("item", "options", "message"),
    [
        (response("int32", 4), {}, "ids without a shape; name the model"),
        (response("int32", 4), {"n_layers": 5, "top_k": 2}, "no whole number of tokens of 5"),
        (response("int32", 3), {"n_layers": 3, "top_k": 2}, "3 rows for 3 prompt and 2 answer"),
        (response("int32", 4, routed_experts_dtype="f"), {"n_layers": 3, "top_k": 2}, "known: int"),
        ({"meta_info": {}}, {"n_layers": 3, "top_k": 2}, "ask with return_routed_experts: true"),
    ],
)
def test_bad_responses_are_named(
    tmp_path: Path, item: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    source = tmp_path / "r.json"
    source.write_text(json.dumps([item]))
    with pytest.raises(InputError, match=rf"r\.json.*{message}"):
        import_sglang(source, tmp_path / "t.parquet", **options)
