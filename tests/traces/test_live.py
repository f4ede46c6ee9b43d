"""A running model as a source: what it pushes, what it does as told, and what it leaves behind."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetier.traces.batch import DECODE, PREFILL, LayerBatch
from moetier.traces.errors import InputError
from moetier.traces.io import TraceReader

torch = pytest.importorskip("torch", reason="a live model needs the extra 'models'")
transformers = pytest.importorskip("transformers", reason="a live model needs the extra 'models'")

from moetier.traces.capture.probe import probe  # noqa: E402  # needs torch
from moetier.traces.capture.run import capture  # noqa: E402
from moetier.traces.live import Choice, LiveModel  # noqa: E402

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "intermediate_size": 16,
    "num_experts_per_tok": 2,
}
PROMPTS = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12]]


class Numbers:
    """A tokenizer of texts that are numbers."""

    pad_token_id = 0

    def __call__(self, text: str) -> dict[str, list[int]]:
        """Return the ids in *text*."""
        return {"input_ids": [int(word) for word in text.split()]}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    kept = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(kept)


@pytest.fixture
def model() -> Any:
    return build("Mixtral", num_local_experts=8)


def build(family: str, **more: Any) -> Any:
    """Return a small random model."""
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **more})
    with warnings.catch_warnings(), torch.random.fork_rng():
        torch.manual_seed(0)
        made = getattr(transformers, f"{family}ForCausalLM")(config)
        for value in made.parameters():
            value.data.normal_(std=0.2)
    return made.eval()


def padded(prompts: list[list[int]]) -> tuple[Any, Any]:
    width = max(map(len, prompts))
    ids = [[0] * (width - len(p)) + p for p in prompts]
    mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def run(
    model: Any,
    decide: Callable[[LayerBatch], Choice | None] | None,
    prompts: list[list[int]] = PROMPTS[:1],
    tokens: int = 4,
    eos: int | None = None,
    **options: Any,
) -> Any:
    """Generate from one padded batch, driven by *decide*; return tokens and logits."""
    ids, mask = padded(prompts)
    arguments = {
        "input_ids": ids,
        "attention_mask": mask,
        "max_new_tokens": tokens,
        "do_sample": False,
        "eos_token_id": eos,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    with torch.no_grad():
        if decide is None:
            made = model.generate(**arguments)
        else:
            live = LiveModel(model, probe(model), **options)
            with live.driven(decide) as drive:
                drive.requests(mask, eos=() if eos is None else (eos,))
                made = model.generate(**arguments)
    return made.sequences.tolist(), torch.stack(made.logits)


def pushed(model: Any, *arguments: Any, **more: Any) -> list[LayerBatch]:
    """Return the batches of a run in which nothing is changed."""
    batches: list[LayerBatch] = []
    run(model, batches.append, *arguments, **more)
    return batches


def keep(batch: LayerBatch) -> Choice:
    """Choose what the router chose, but have it computed from the choice."""
    assert batch.weights is not None
    return Choice(batch.token_ids(), list(batch.experts), batch.weights)


def test_a_prompt_is_one_batch_a_layer_and_each_token_another(model: Any) -> None:
    batches = pushed(model)

    assert [(b.step, b.phase, b.layer, b.n_tokens, b.context) for b in batches] == [
        (0, PREFILL, 0, 5, 15),
        (0, PREFILL, 1, 5, 15),
        *((s, DECODE, layer, 1, 5 + s) for s in (1, 2, 3) for layer in (0, 1)),
    ]
    assert all(len(b.experts) == 2 * b.n_tokens for b in batches)
    assert all(b.scores is not None and b.scores.shape == (b.n_tokens, 8) for b in batches)
    assert all(b.predict is None for b in batches)


def test_scores_are_left_out_where_nobody_reads_them(model: Any) -> None:
    batches: list[LayerBatch] = []
    run(model, batches.append, with_scores=False)

    assert all(batch.scores is None for batch in batches)
    assert all(batch.weights is not None for batch in batches)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_live_model_pushes_what_its_capture_holds(model: Any, tmp_path: Path, size: int) -> None:
    texts = [" ".join(map(str, prompt)) for prompt in PROMPTS]
    trace = capture(
        model, Numbers(), texts, tmp_path / "t.parquet", max_new_tokens=4, batch_size=size
    )
    recorded = list(TraceReader(trace, with_scores=True).batches())
    live: list[LayerBatch] = []
    source = LiveModel(model, probe(model))
    with torch.no_grad(), source.driven(live.append) as drive:
        for first in range(0, 3, size):
            ids, mask = padded(PROMPTS[first : first + size])
            drive.requests(mask, eos=(2,), first=first)
            model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, do_sample=False)

    assert len(live) == len(recorded)
    for mine, other in zip(live, recorded, strict=True):
        for name in ("step", "phase", "layer", "n_tokens", "context", "experts", "requests"):
            assert getattr(mine, name) == getattr(other, name), name
        assert mine.weights is not None
        assert mine.weights.tobytes() == np.ascontiguousarray(other.weights).tobytes()
        assert mine.scores is not None
        assert mine.scores.tobytes() == np.ascontiguousarray(other.scores).tobytes()


def test_padding_and_finished_requests_are_not_pushed(model: Any) -> None:
    sequences, _ = run(model, None, PROMPTS)
    end = sequences[1][5]  # what the second request says first

    batches = [b for b in pushed(model, PROMPTS, eos=end) if b.layer == 0]

    assert batches[0].requests == [0] * 5 + [1] * 2 + [2] * 3
    assert all(1 not in (batch.requests or []) for batch in batches[1:])


def test_when_all_requests_are_finished_nothing_is_asked(model: Any) -> None:
    batches: list[LayerBatch] = []
    live = LiveModel(model, probe(model))
    with torch.no_grad(), live.driven(batches.append) as drive:
        drive.requests(torch.ones(1, 2), eos=(9,))
        model(input_ids=torch.tensor([[3, 4]]))
        model(input_ids=torch.tensor([[9]]))

    assert {batch.step for batch in batches} == {0}


def test_doing_nothing_changes_no_bit_and_leaves_no_trace(model: Any) -> None:
    before = hooks(model)
    tokens, logits = run(model, None, PROMPTS)
    again, driven = run(model, lambda _: None, PROMPTS)

    assert again == tokens
    assert torch.equal(driven, logits)
    assert hooks(model) == before
    assert "experts" not in vars(model)


def hooks(model: Any) -> list[int]:
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


def test_an_error_in_between_leaves_no_trace_either(model: Any) -> None:
    before = hooks(model)

    def fail(batch: LayerBatch) -> None:
        raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        run(model, fail)

    assert hooks(model) == before


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS])
def test_the_routers_own_choice_computes_the_same(model: Any, prompts: list[list[int]]) -> None:
    tokens, logits = run(model, None, prompts)
    again, driven = run(model, keep, prompts)

    assert again == tokens
    torch.testing.assert_close(driven, logits)


def test_another_expert_changes_the_outcome(model: Any) -> None:
    def swap(batch: LayerBatch) -> Choice:
        choice = keep(batch)
        experts = [(e + 1) % 8 for e in choice.experts]
        return Choice(choice.tokens, experts, choice.weights)

    _, logits = run(model, None)
    _, driven = run(model, swap)

    assert not torch.equal(driven, logits)


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS])
def test_weight_zero_is_leaving_out(model: Any, prompts: list[list[int]]) -> None:
    def zero(batch: LayerBatch) -> Choice:
        assert batch.weights is not None
        weights = batch.weights.copy()
        weights[::2] = 0
        return Choice(batch.token_ids(), batch.experts, weights)

    def drop(batch: LayerBatch) -> Choice:
        assert batch.weights is not None
        return Choice(batch.token_ids()[1::2], batch.experts[1::2], batch.weights[1::2])

    zeroed, dropped, kept = (run(model, decide, prompts)[1] for decide in (zero, drop, None))

    torch.testing.assert_close(zeroed[0], dropped[0])
    assert not torch.allclose(zeroed[0], kept[0])


def test_a_token_may_have_more_experts_or_none(model: Any) -> None:
    """The first token gets four experts, every other one nothing."""
    widths: list[int] = []

    def four(batch: LayerBatch) -> Choice:
        return Choice([0] * 4, [0, 1, 2, 3], np.full(4, 0.25, np.float32))

    def look(module: Any, arguments: tuple[Any, ...]) -> None:
        widths.append(arguments[1].shape[1])

    live = LiveModel(model, probe(model))
    with torch.no_grad(), live.driven(four) as drive:
        handle = model.model.layers[0].mlp.experts.register_forward_pre_hook(look)
        drive.requests(torch.ones(1, 3))
        logits = model(input_ids=torch.tensor([[3, 4, 5]])).logits
        handle.remove()

    assert widths == [4]
    assert torch.isfinite(logits).all()


def test_a_choice_may_come_in_any_order(model: Any) -> None:
    def backwards(batch: LayerBatch) -> Choice:
        choice = keep(batch)
        return Choice(choice.tokens[::-1], choice.experts[::-1], choice.weights[::-1])

    _, logits = run(model, None, PROMPTS)
    _, driven = run(model, backwards, PROMPTS)

    torch.testing.assert_close(driven, logits)


def test_a_predictor_is_asked_when_the_planner_wants_it(model: Any) -> None:
    class Constant:
        def predict(self, call: Any, valid: Any, batch: LayerBatch) -> dict[int, Any]:
            assert len(valid) == batch.n_tokens
            assert call.moe_layer == batch.layer
            return {1: np.zeros((batch.n_tokens, 8), np.float32)}

    seen = []

    def ask(batch: LayerBatch) -> None:
        assert batch.predict is not None
        seen.append(batch.predict(batch)[1].shape)

    run(model, ask, PROMPTS, predictor=Constant())

    assert seen[0] == (10, 8)


def test_steps_go_on_from_one_generation_to_the_next(model: Any) -> None:
    batches: list[LayerBatch] = []
    live = LiveModel(model, probe(model))
    with torch.no_grad(), live.driven(batches.append) as drive:
        for first in range(3):
            drive.requests(torch.ones(1, 2), first=first)
            model(input_ids=torch.tensor([[3, 4]]))

    assert [b.step for b in batches if b.layer == 0] == [0, 1, 2]
    assert [(b.requests or [])[0] for b in batches if b.layer == 0] == [0, 1, 2]


def test_a_forward_pass_that_nobody_announced_is_refused(model: Any) -> None:
    live = LiveModel(model, probe(model))

    with (
        torch.no_grad(),
        live.driven(lambda _: None),
        pytest.raises(InputError, match="without input_ids"),
    ):
        model(input_ids=torch.tensor([[3, 4]]))


def test_other_tokens_than_announced_are_refused(model: Any) -> None:
    live = LiveModel(model, probe(model))

    with torch.no_grad(), live.driven(lambda _: None) as drive:
        drive.requests(torch.ones(1, 2))
        with pytest.raises(InputError, match="took columns 0 to 3 of prompts 2 wide"):
            model(input_ids=torch.tensor([[3, 4, 5]]))
        drive.requests(torch.ones(1, 2))
        drive.begin(0, (torch.tensor([[3, 4]]),), {})
        with pytest.raises(InputError, match="MoE layer 0 got 1 tokens, another number"):
            model.model(inputs_embeds=torch.zeros(1, 1, 32))
