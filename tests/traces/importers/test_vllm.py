"""Tests of importing vLLM's routed experts, in files of its shapes."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetier.traces.batch import DECODE, PREFILL
from moetier.traces.errors import InputError
from moetier.traces.importers.vllm import import_vllm
from moetier.traces.io import TraceReader

LAYERS, K, EXPERTS = 3, 2, 8


def ids_of(tokens: int, seed: int = 0, *, layers: int = LAYERS, dtype: Any = np.int16) -> Any:
    draw = np.random.Generator(np.random.PCG64(seed))
    order = draw.random((tokens, layers, EXPERTS)).argsort(axis=2)[..., :K]
    return order.astype(dtype)


def imported(source: Path, **options: Any) -> TraceReader:
    out = source.parent / "t.parquet"
    import_vllm(source, out, **options)
    reader = TraceReader(out)
    reader.validate()
    return reader


def saved(tmp_path: Path, **arrays: Any) -> Path:
    np.savez(tmp_path / "r.npz", **arrays)
    return tmp_path / "r.npz"


def encoded(ids: Any) -> str:
    buffer = io.BytesIO()
    np.save(buffer, ids, allow_pickle=False)
    return base64.b64encode(buffer.getvalue()).decode()


def response(ids: Any, prompt: int, answer: int) -> dict[str, Any]:
    return {
        "choices": [{"index": 0, "routed_experts": encoded(ids)}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": answer},
    }


def test_prompt_and_answer_of_older_releases_are_prefill_and_decode(tmp_path: Path) -> None:
    before, after = ids_of(3), ids_of(2, 1)
    source = saved(tmp_path, prompt_routed_experts=before, routed_experts=after)
    batches = list(imported(source).batches())

    assert [(b.phase, b.step, b.n_tokens) for b in batches[::LAYERS]] == [
        (PREFILL, 0, 3),
        (DECODE, 1, 1),
        (DECODE, 2, 1),
    ]
    assert [b.experts for b in batches[:LAYERS]] == [
        before[:, i].ravel().tolist() for i in range(3)
    ]
    assert [b.experts for b in batches[LAYERS:]] == [
        after[t, i].tolist() for t in range(2) for i in range(3)
    ]
    assert [b.context for b in batches[::LAYERS]] == [6, 4, 5]


def test_several_requests_follow_one_another(tmp_path: Path) -> None:
    arrays = {
        "a/routed_experts": ids_of(3), "a/prompt_tokens": np.array(2),
        "b/routed_experts": ids_of(4, 1, dtype=np.uint8), "b/prompt_tokens": np.array(1),
    }  # fmt: skip
    batches = list(imported(saved(tmp_path, **arrays)).batches())

    assert [(b.requests or [])[0] for b in batches[::LAYERS]] == [0, 0, 1, 1, 1, 1]
    assert [b.step for b in batches[::LAYERS]] == list(range(6))


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16])
def test_responses_of_the_server_carry_base64(tmp_path: Path, suffix: str, dtype: Any) -> None:
    ids = ids_of(5, dtype=dtype)
    source = tmp_path / f"r{suffix}"
    source.write_text(json.dumps(response(ids, 4, 2)))
    batches = list(imported(source).batches())

    assert [b.phase for b in batches] == [PREFILL] * 3 + [DECODE] * 3
    assert batches[-1].experts == ids[4, 2].tolist()


def test_a_lone_array_needs_the_end_of_its_prompt(tmp_path: Path) -> None:
    np.save(tmp_path / "r.npy", ids_of(3))
    with pytest.raises(InputError, match=r"where decode begins; give --option prompt_tokens=N"):
        imported(tmp_path / "r.npy")

    assert len(list(imported(tmp_path / "r.npy", prompt_tokens=0).batches())) == 9


def test_what_vllm_does_not_say_is_unknown(tmp_path: Path) -> None:
    header = imported(saved(tmp_path, routed_experts=ids_of(3), prompt_tokens=1)).header

    assert {
        "weights", "slot order", "batches", "prefill chunks", "model", "layer", "n_experts",
    } <= set(header.unknown)  # fmt: skip
    assert header.provenance.importer == "vllm"
    assert header.score_kind == "none"


def test_layers_are_those_of_the_model(tmp_path: Path) -> None:
    draw = np.random.Generator(np.random.PCG64(0))
    ids = draw.random((3, 26, 64)).argsort(axis=2)[..., :6].astype(np.int16)
    source = saved(tmp_path, routed_experts=ids, prompt_tokens=1)
    moe_only = imported(source, model="deepseek-v2-lite").header.geometry
    every = np.concatenate([np.zeros_like(ids[:, :1]), ids], axis=1)  # the dense first layer
    source = saved(tmp_path, routed_experts=every, prompt_tokens=1)
    all_layers = imported(source, model="deepseek-v2-lite")

    assert moe_only.moe_layers == all_layers.header.geometry.moe_layers == list(range(1, 27))
    assert next(iter(all_layers.batches())).experts == ids[0, 0].tolist()


def test_physical_ids_become_logical(tmp_path: Path) -> None:
    table = np.tile(np.array([0, 1, 2, 3, 4, 5, 6, 7, 0, 1]), (LAYERS, 1))
    ids = np.tile(np.array([[8, 3]]), (2, LAYERS, 1))
    source = saved(tmp_path, routed_experts=ids, prompt_tokens=0, physical_to_logical_map=table)
    batches = list(imported(source, n_experts=8).batches())

    assert {tuple(b.experts) for b in batches} == {(0, 3)}
    with pytest.raises(InputError, match=r"expert 8 occurs, .* physical_to_logical_map"):
        imported(saved(tmp_path, routed_experts=ids, prompt_tokens=0), n_experts=8)


def test_rows_that_nobody_wrote_are_refused_and_a_mask_lets_them_pass(tmp_path: Path) -> None:
    ids = ids_of(4)
    ids[0] = 0
    with pytest.raises(InputError, match=r"token 0: all ids of all layers are 0.*`valid`"):
        imported(saved(tmp_path, routed_experts=ids, prompt_tokens=2))
    valid = np.array([False, True, True, True])
    batches = list(
        imported(saved(tmp_path, routed_experts=ids, prompt_tokens=2, valid=valid)).batches()
    )

    assert batches[0].n_tokens == 1
    assert batches[0].experts == ids[1, 0].tolist()


@pytest.mark.parametrize("padding", [np.arange(K), np.full(K, -1)])
def test_padding_at_the_end_is_left_out(tmp_path: Path, padding: Any) -> None:
    ids = np.concatenate([ids_of(3, 5), np.broadcast_to(padding, (2, LAYERS, K))])
    batches = list(imported(saved(tmp_path, routed_experts=ids, prompt_tokens=1)).batches())

    assert len(batches) == 3 * LAYERS


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"experts": ids_of(2)}, "key 'experts'; known: routed_experts"),
        ({"prompt_tokens": 1}, "no key 'routed_experts'"),
        ({"routed_experts": ids_of(2)[0], "prompt_tokens": 1}, r"has shape \(3, 2\)"),
        ({"routed_experts": ids_of(2, dtype=np.float32), "prompt_tokens": 1}, "holds float32"),
        ({"routed_experts": ids_of(2), "prompt_tokens": 5}, "5 prompt tokens, but 2 rows"),
        ({"routed_experts": ids_of(2), "prompt_tokens": -1}, "prompt_tokens is array"),
        (
            {"routed_experts": ids_of(4), "prompt_tokens": 2, "completion_tokens": 2},
            "4 rows for 2 prompt and 2 answer tokens; expected 3",
        ),
        (
            {"routed_experts": ids_of(2), "prompt_routed_experts": ids_of(2, layers=2)},
            "expected the same layers and top-k",
        ),
        (
            {"routed_experts": np.full((2, 3, 2), 3), "prompt_tokens": 1},
            "routed token 0, layer 0: expert 3 twice",
        ),
        (
            {"routed_experts": ids_of(2), "prompt_tokens": 1, "valid": np.ones(3, bool)},
            r"valid has shape \(3,\)",
        ),
        (
            {"routed_experts": np.full((1, 1, 2), 65535, np.uint16), "prompt_tokens": 0},
            "expert 65535; .* a -1 stored without a sign",
        ),
        (
            {"routed_experts": np.array([{}], object)},
            "cannot be read as .npz .*pickle",
        ),
    ],
)
def test_bad_arrays_are_named(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=rf"r\.npz.*{message}"):
        imported(saved(tmp_path, **arrays))

    assert not (tmp_path / "t.parquet").exists()


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[1]", "line 1: is no object"),
        ("{}", "no 'choices' and 'usage'"),
        ('{"choices": [{}], "usage": {}}', "missing; serve with --enable-return-routed-experts"),
        (json.dumps(response(ids_of(5), 4, 3)), "5 rows for 4 prompt and 3 answer tokens"),
        (
            '{"choices": [{"routed_experts": "?"}], "usage": {"prompt_tokens": 1}}',
            "not base64",
        ),
        (
            '{"choices": [{"routed_experts": "AAAA"}], "usage": {"prompt_tokens": 1}}',
            "cannot be read as .npy",
        ),
    ],
)
def test_bad_responses_are_named(tmp_path: Path, item: str, message: str) -> None:
    source = tmp_path / "r.jsonl"
    source.write_text(item)
    with pytest.raises(InputError, match=message):
        imported(source)
