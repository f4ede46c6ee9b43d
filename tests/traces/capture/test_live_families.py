"""One mechanism drives every family that can be captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moetier.traces.batch import LayerBatch

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from moetier.traces.capture.probe import probe  # noqa: E402  # needs torch
from moetier.traces.live import Choice, LiveModel  # noqa: E402

IDS = torch.tensor([[0, 0, 3, 4], [5, 6, 7, 8]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])


def logits_of(model: Any, decide: Callable[[LayerBatch], Choice | None] | None) -> Any:
    arguments = {
        "attention_mask": MASK, "max_new_tokens": 3, "do_sample": False, "eos_token_id": None,
        "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip
    with torch.no_grad():
        if decide is None:
            return torch.stack(model.generate(IDS, **arguments).logits)
        with LiveModel(model, probe(model)).driven(decide) as drive:
            drive.requests(MASK)
            return torch.stack(model.generate(IDS, **arguments).logits)


def test_every_family_can_be_driven(family: str, build: Callable[..., Any]) -> None:
    model = build(family)
    plain = logits_of(model, None)
    batches: list[LayerBatch] = []
    layers = len(probe(model).layers)

    def keep(batch: LayerBatch) -> Choice:
        assert batch.weights is not None
        return Choice(batch.token_ids(), list(batch.experts), batch.weights)

    def swap(batch: LayerBatch) -> Choice:
        choice = keep(batch)
        return Choice(choice.tokens, [(e + 1) % 8 for e in choice.experts], choice.weights)

    assert torch.equal(logits_of(model, batches.append), plain)
    assert [batch.n_tokens for batch in batches] == [6] * layers + [2] * 2 * layers
    torch.testing.assert_close(logits_of(model, keep), plain, rtol=1e-3, atol=1e-4)
    assert not torch.equal(logits_of(model, swap), plain)
