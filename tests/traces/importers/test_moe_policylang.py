"""Tests of importing moe-policylang's traces; its own writer is used where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moetier.traces.batch import DECODE, PREFILL
from moetier.traces.errors import InputError
from moetier.traces.importers.moe_policylang import import_moe_policylang
from moetier.traces.io import TraceReader

HEAD = {"model_name": "org/some", "num_layers": 4, "num_experts": 4, "top_k": 2, "num_entries": 0}
PROBS = [0.4, 0.3, 0.2, 0.1]


def entry(p: int, t: int, layer: int, e: list[int], **more: Any) -> dict[str, Any]:
    return {"p": p, "t": t, "l": layer, "e": e, "s": [0.4, 0.3][: len(e)]} | more


def prompt(p: int, **more: Any) -> list[dict[str, Any]]:
    """Return two prompt tokens and one decoded, at layers 1 and 3, as hooks record them."""
    first = [entry(p, t, i, [t, 2], ph="prefill", **more) for i in (1, 3) for t in (0, 1)]
    return first + [entry(p, 2, i, [3, i - 1], ph="decode", **more) for i in (1, 3)]


def imported(tmp_path: Path, entries: list[Any], head: Any = HEAD, **options: Any) -> TraceReader:
    source = tmp_path / "r.jsonl"
    source.write_text("\n".join(json.dumps(item) for item in [head, *entries]))
    import_moe_policylang(source, tmp_path / "t.parquet", **options)
    reader = TraceReader(tmp_path / "t.parquet", with_scores=True)
    reader.validate()
    return reader


def test_prompts_become_requests_with_a_prefill_and_steps(tmp_path: Path) -> None:
    reader = imported(tmp_path, prompt(0) + prompt(5))
    batches = list(reader.batches())

    assert reader.header.geometry.moe_layers == [1, 3]
    assert [(b.phase, b.step, b.n_tokens, (b.requests or [])[0]) for b in batches[::2]] == [
        (PREFILL, 0, 2, 0), (DECODE, 1, 1, 0), (PREFILL, 2, 2, 5), (DECODE, 3, 1, 5),
    ]  # fmt: skip
    assert batches[0].experts == [0, 2, 1, 2]
    assert batches[3].experts == [3, 2]
    assert batches[3].weights is not None
    assert batches[3].weights.tolist() == pytest.approx([0.4, 0.3])


@pytest.mark.parametrize(("key", "kind"), [("sm", "probabilities"), ("lg_l", "logits")])
def test_scores_keep_their_kind(tmp_path: Path, key: str, kind: str) -> None:
    reader = imported(tmp_path, prompt(0, **{key: PROBS}))
    batch = next(iter(reader.batches()))

    assert reader.header.score_kind == kind
    assert batch.scores is not None
    assert batch.scores.ravel().tolist() == pytest.approx(PROBS * 2)


def test_without_a_phase_it_has_to_be_told(tmp_path: Path) -> None:
    entries = [entry(0, t, 1, [t, 2]) for t in (0, 1)]
    with pytest.raises(InputError, match=r"line 2: does not say .*--option phase=decode"):
        imported(tmp_path, entries)

    assert [b.phase for b in imported(tmp_path, entries, phase="decode").batches()] == [DECODE] * 2


def test_padded_ids_are_left_out(tmp_path: Path) -> None:
    batch = next(iter(imported(tmp_path, [entry(0, 0, 1, [3, -1], ph="decode")]).batches()))

    assert batch.experts == [3]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_files_of_the_package_itself_are_read(tmp_path: Path, suffix: str) -> None:
    recorder = pytest.importorskip("moe_policylang.integrations.trace_recorder")
    entries = [
        recorder.TraceEntry(0, t, layer, [t, 3], [0.4, 0.3], PROBS, phase="decode")
        for t in (0, 1)
        for layer in (0, 1)
    ]
    source = tmp_path / f"own{suffix}"
    recorder.TraceRecording("m", 2, 4, 2, entries, True).save(source)
    header = import_moe_policylang(source, tmp_path / "t.parquet")
    batches = list(TraceReader(tmp_path / "t.parquet").batches())

    assert header.geometry.n_experts == 4
    assert [b.experts for b in batches] == [[0, 3], [0, 3], [1, 3], [1, 3]]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([entry(0, -1, 1, [0])], "line 2: key 't': -1 is not"),
        ([entry(0, 0, 1, [1, 1])], "line 2: key 'e': an expert twice"),
        ([{"p": 0, "t": 0, "l": 0, "e": "x"}], "line 2: key 'e': 'x' is not a list"),
        ([{"p": 0, "t": 0, "l": 0, "e": [1], "s": [1, 2]}], "2 scores for 1 experts"),
        ([entry(0, 0, 1, [0], ph="warm")], "key 'ph': 'warm' is neither"),
        ([[1]], "line 2: is no object"),
        ([entry(0, 0, 1, [9, 1], ph="decode")], "expert 9, top-2 .* do not fit 4 experts"),
        ([entry(0, 0, 1, [1], ph="decode", sm=[1.0])], r"scores of \[1\] experts do not fit"),
        (prompt(0) + prompt(1) + prompt(0), "prompt 0 comes back after another one"),
        (
            [entry(0, 3, 1, [0], ph="prefill"), entry(0, 2, 1, [0], ph="decode")],
            "a decoded token comes before token 3 of the prefill",
        ),
        ([], "no routed tokens"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, entries: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        imported(tmp_path, entries)

    assert not (tmp_path / "t.parquet").exists()
