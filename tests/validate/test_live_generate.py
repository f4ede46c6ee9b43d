"""Generation: tokens, likelihoods and digests of what a model did, free or forced."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="a live model needs the extra 'models'")
transformers = pytest.importorskip("transformers", reason="a live model needs the extra 'models'")

from moetier.traces.capture.load import load_model  # noqa: E402  # needs torch
from moetier.traces.errors import InputError  # noqa: E402
from moetier.traces.samples import moe_tiny_path  # noqa: E402
from moetier.validate.live_generate import (  # noqa: E402
    Decoding,
    Request,
    ends_of,
    generate,
    pad_of,
)

TEXTS = ["add 21,34=", "copy walrus=", "rev abc="]
END = 1


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    return load_model(str(moe_tiny_path()))


@pytest.fixture(scope="module")
def prompts(tiny: tuple[Any, Any]) -> list[tuple[int, ...]]:
    return [tuple(tiny[1](text)["input_ids"]) for text in TEXTS]


def by_hand(model: Any, prompt: tuple[int, ...], n: int) -> list[Any]:
    """Return the logits of *n* greedy steps, whole text by whole text."""
    ids, found = list(prompt), []
    with torch.no_grad():
        for _ in range(n):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            found.append(logits)
            ids.append(int(logits.argmax()))
    return found


def test_tokens_and_likelihoods_are_those_of_the_model(
    tiny: tuple[Any, Any], prompts: list[tuple[int, ...]]
) -> None:
    model, tokenizer = tiny
    (output,) = generate(model, [Request(prompts[0], 2)], Decoding(eos=(END,)))
    logits = by_hand(model, prompts[0], 2)

    assert tokenizer.decode(list(output.tokens)) == "55"
    for token, nll, row in zip(output.tokens, output.nll, logits, strict=True):
        assert nll == pytest.approx(-float(row.double().log_softmax(-1)[token]), abs=1e-5)


def test_a_request_ends_with_its_end_token(
    tiny: tuple[Any, Any], prompts: list[tuple[int, ...]]
) -> None:
    free = generate(tiny[0], [Request(prompts[1], 20)], Decoding(eos=(END,)))
    endless = generate(tiny[0], [Request(prompts[1], 20)], Decoding())

    assert free[0].tokens[-1] == END
    assert len(free[0].tokens) == len("walrus") + 1
    assert len(endless[0].tokens) == 20
    assert endless[0].tokens[:7] == free[0].tokens


def test_a_batch_gives_what_its_requests_give_alone(
    tiny: tuple[Any, Any], prompts: list[tuple[int, ...]]
) -> None:
    requests = [Request(prompt, 9) for prompt in prompts]
    alone = generate(tiny[0], requests, Decoding(1, (END,)))
    together = generate(tiny[0], requests, Decoding(3, (END,)))

    assert [o.tokens for o in together] == [o.tokens for o in alone]
    for x, y in zip(alone, together, strict=True):
        assert x.nll == pytest.approx(y.nll, abs=1e-4)


def test_a_limit_cuts_each_request_of_a_batch_on_its_own(
    tiny: tuple[Any, Any], prompts: list[tuple[int, ...]]
) -> None:
    requests = [Request(prompts[0], 1), Request(prompts[1], 3)]
    found = generate(tiny[0], requests, Decoding(2, (END,)))

    assert [len(o.tokens) for o in found] == [1, 3]


def test_digests_tell_logits_apart(tiny: tuple[Any, Any], prompts: list[tuple[int, ...]]) -> None:
    model = tiny[0]
    requests = [Request(prompt, 2) for prompt in prompts]
    first, second = (generate(model, requests, Decoding(eos=(END,))) for _ in range(2))
    weight = model.model.norm.weight
    kept = weight.data.clone()
    weight.data[0] *= 1 + 1e-6
    changed = generate(model, requests, Decoding(eos=(END,)))
    weight.data.copy_(kept)

    assert first == second
    assert [o.tokens for o in changed] == [o.tokens for o in first]
    assert all(x.digest != y.digest for x, y in zip(changed, first, strict=True))
    assert len({o.digest for o in first}) == 3


@pytest.mark.parametrize("size", [1, 2])
def test_forcing_what_the_model_would_say_changes_nothing(
    tiny: tuple[Any, Any], prompts: list[tuple[int, ...]], size: int
) -> None:
    free = generate(tiny[0], [Request(p, 9) for p in prompts], Decoding(size, (END,)))
    forced = generate(
        tiny[0],
        [Request(p, 9, o.tokens) for p, o in zip(prompts, free, strict=True)],
        Decoding(size, (END,)),
    )

    assert forced == free


def test_another_answer_is_forced_and_scored_through_the_cache(
    tiny: tuple[Any, Any], prompts: list[tuple[int, ...]]
) -> None:
    model, tokenizer = tiny
    wrong = tuple(tokenizer("57\n")["input_ids"])
    (output,) = generate(model, [Request(prompts[0], 3, wrong)], Decoding(eos=(END,)))
    with torch.no_grad():
        ids = torch.tensor([[*prompts[0], *wrong]])
        rows = model(input_ids=ids, use_cache=False).logits[0, -4:-1].double().log_softmax(-1)

    assert output.tokens == wrong
    assert output.nll == pytest.approx(
        [-float(r[t]) for r, t in zip(rows, wrong, strict=True)], 1e-4
    )
    assert output.nll[1] > 1


def test_forced_answers_of_different_lengths_run_together(
    tiny: tuple[Any, Any], prompts: list[tuple[int, ...]]
) -> None:
    tokenizer = tiny[1]
    answers = [tuple(tokenizer(text)["input_ids"]) for text in ("1", "abcdef\n", "zz")]
    requests = [Request(p, len(a), a) for p, a in zip(prompts, answers, strict=True)]
    alone = generate(tiny[0], requests, Decoding(1, (END,)))
    together = generate(tiny[0], requests, Decoding(3, (END,)))

    assert [o.tokens for o in together] == answers
    for x, y in zip(alone, together, strict=True):
        assert x.nll == pytest.approx(y.nll, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("forced", [None, (5, 6)])
def test_logits_that_are_not_numbers_are_refused(
    tiny: tuple[Any, Any], prompts: list[tuple[int, ...]], forced: tuple[int, ...] | None
) -> None:
    model, kept = tiny[0], tiny[0].lm_head.weight.data
    config = model.generation_config
    try:
        model.lm_head.weight.data = torch.full_like(kept, torch.nan)
        with pytest.raises(InputError, match=r"logits for token 1 .* are not numbers \(NaN\)"):
            generate(model, [Request(prompts[0], 2, forced)], Decoding(eos=(END,)))
    finally:
        model.lm_head.weight.data = kept

    assert model.generation_config is config


def test_batches_are_counted_and_the_model_keeps_its_config(
    tiny: tuple[Any, Any], prompts: list[tuple[int, ...]]
) -> None:
    model, heard = tiny[0], list[int]()
    kept = model.generation_config
    generate(model, [Request(p, 1) for p in prompts], Decoding(2), on_batch=heard.append)

    assert heard == [2, 1]
    assert model.generation_config is kept


def test_ends_and_padding_come_from_checkpoint_or_tokenizer(tiny: tuple[Any, Any]) -> None:
    class Model:
        """What is read of a model."""

        def __init__(self, eos: Any, pad: Any, configured: Any = None) -> None:
            """Have the *eos* and *pad* of a generation config, and the *configured* eos."""
            self.generation_config = transformers.GenerationConfig(
                eos_token_id=eos, pad_token_id=pad
            )
            self.config = transformers.PretrainedConfig(eos_token_id=configured)

    class Tokenizer:
        """What is read of a tokenizer."""

        pad_token_id = 7

    assert ends_of(tiny[0]) == (END,)
    assert ends_of(Model([3, 4], None)) == (3, 4)
    assert ends_of(Model(None, None, 5)) == (5,)
    assert ends_of(Model(None, None)) == ()
    assert pad_of(Model(None, 2), Tokenizer()) == 2
    assert pad_of(Model(None, None), Tokenizer()) == 7
    assert pad_of(Model(None, None), object()) == 0
