"""A capture is a trace: its rows, its header, and the model it leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moetier.traces.batch import DECODE, PREFILL
from moetier.traces.columns import Columns, concat
from moetier.traces.io import TraceReader

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from moetier.traces.capture.run import capture  # noqa: E402

Build = Callable[..., Any]
PROMPTS = ["one two three four five", "six seven", "eight nine ten"]


def rows_of(path: Path) -> Columns:
    reader = TraceReader(path, with_scores=True)
    reader.validate()
    return concat(list(reader.columns()))


def tokens_of(model: Any, tokenizer: Any, prompt: str, n: int) -> list[int]:
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False
    )
    result: list[int] = made[0].tolist()
    return result


def test_prefill_and_decode_of_one_request(tmp_path: Path, build: Build, tokenizer: Any) -> None:
    model = build("Qwen3Moe")
    out = capture(model, tokenizer, PROMPTS[:1], tmp_path / "t.parquet", max_new_tokens=4)
    rows = rows_of(out)
    reader = TraceReader(out)

    assert len(rows) == 2 * (len(tokens_of(model, tokenizer, PROMPTS[0], 4)) - 1)
    assert rows.valid.all()
    assert [(b.step, b.phase, b.layer, b.n_tokens) for b in reader.batches()] == [
        (0, PREFILL, 0, 5),
        (0, PREFILL, 1, 5),
        *((step, DECODE, layer, 1) for step in (1, 2, 3) for layer in (0, 1)),
    ]
    assert rows.position.tolist() == [0, 1, 2, 3, 4] * 2 + [5, 5, 6, 6, 7, 7]
