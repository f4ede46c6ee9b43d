"""Router inputs beside a trace belong to its valid rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moetier.traces.columns import concat
from moetier.traces.errors import InputError
from moetier.traces.io import TraceReader

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from moetier.traces.capture import hidden as module  # noqa: E402  # needs torch
from moetier.traces.capture.hidden import HiddenWriter, hidden_folder, read_hidden  # noqa: E402
from moetier.traces.capture.run import capture  # noqa: E402

Build = Callable[..., Any]
PROMPTS = ["one two three four five", "six seven"]


def test_router_logits_come_out_of_the_stored_inputs(
    tmp_path: Path, build: Build, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 1000)  # several shards
    model = build("Qwen3Moe")
    out = capture(
        model,
        tokenizer,
        PROMPTS,
        tmp_path / "t.parquet",
        max_new_tokens=4,
        batch_size=2,
        hidden=True,
    )
    rows = concat(list(TraceReader(out, with_scores=True).columns()))

    assert len(list(hidden_folder(out).iterdir())) > 1
    seen = []
    for batch in read_hidden(out):
        mine = rows.take(
            (rows.step == batch.step) & (rows.moe_layer == batch.moe_layer) & rows.valid
        )
        weight = model.model.layers[batch.moe_layer].mlp.gate.weight
        logits = torch.nn.functional.linear(batch.hidden, weight)
        assert mine.scores is not None
        torch.testing.assert_close(logits.detach(), torch.from_numpy(mine.scores))
        seen.append((batch.step, batch.moe_layer))
    assert seen == [(step, layer) for step in range(4) for layer in (0, 1)]


def test_the_type_of_the_model_is_kept(tmp_path: Path, build: Build, tokenizer: Any) -> None:
    model = build("Gemma4").to(torch.bfloat16)
    out = capture(model, tokenizer, PROMPTS, tmp_path / "t.parquet", max_new_tokens=1, hidden=True)

    first = next(read_hidden(out))
    assert first.hidden.dtype == torch.bfloat16
    assert first.hidden.shape == (5, 32)


def test_an_error_leaves_no_folder(tmp_path: Path, build: Build, tokenizer: Any) -> None:
    model = build("Qwen3Moe")
    (tmp_path / "t.parquet").mkdir()  # so that the trace cannot be written

    with pytest.raises(InputError):
        capture(model, tokenizer, PROMPTS, tmp_path / "t.parquet", max_new_tokens=1, hidden=True)
    assert [item.name for item in tmp_path.iterdir()] == ["t.parquet"]


def test_a_router_that_is_not_found_is_refused_by_name(
    tmp_path: Path, build: Build, tokenizer: Any
) -> None:
    model = build("Mixtral")
    block = model.model.layers[1].mlp
    block.chooser = block.gate
    del block.gate
    block.__class__ = type("Block", (type(block),), {"gate": property(lambda self: self.chooser)})

    with pytest.raises(InputError, match=r"router at 'model\.layers\.1\.mlp\.experts'"):
        capture(model, tokenizer, PROMPTS, tmp_path / "t.parquet", max_new_tokens=1, hidden=True)
    assert list(tmp_path.iterdir()) == []

    out = capture(model, tokenizer, PROMPTS, tmp_path / "t.parquet", max_new_tokens=1)
    header = TraceReader(out).header
    assert header.score_kind == "none"
    assert header.unknown == ["router scores"]


def test_a_second_capture_replaces_the_first(tmp_path: Path) -> None:
    trace = tmp_path / "t.parquet"
    for value in (1.0, 2.0):
        with HiddenWriter(trace) as writer:
            writer.add(0, 0, torch.full((1, 2), value))

    assert [batch.hidden.tolist() for batch in read_hidden(trace)] == [[[2.0, 2.0]]]


def test_where_nothing_was_stored_it_says_how_to(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--hidden"):
        next(read_hidden(tmp_path / "t.parquet"))
    with (
        pytest.raises(InputError, match="does not exist"),
        HiddenWriter(tmp_path / "none" / "t.parquet"),
    ):
        pytest.fail("opened")
