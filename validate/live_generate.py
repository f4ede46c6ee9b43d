"""This module lets a model generate and keeps what shows how: tokens, likelihoods, exact logits.

It runs `generate` as a user would, greedily, one token at a time through the cache. A request may
be forced along given tokens instead, which measures how likely they are under the same conditions:
prompt as prefill, then one decode step a token. Decode-only policies therefore act on it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from moetier.traces.errors import InputError
from moetier.traces.live import Drive


@dataclass(frozen=True, slots=True)
class Request:
    """Token ids to begin with; at most *limit* more, or exactly those of *forced*."""

    prompt: tuple[int, ...]
    limit: int
    forced: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """What a request produced: its tokens, and -ln(probability) of each in nats.

    *digest* stands for the logits of all its steps, bit by bit; *greedy* says whether each token
    was the likeliest.
    """

    tokens: tuple[int, ...]
    nll: tuple[float, ...]
    digest: str
    greedy: bool = True


@dataclass(slots=True)
class Decoding:
    """How requests are run: *batch_size* at a time; *eos* ends one, nothing does if it is empty."""

    batch_size: int = 1
    eos: tuple[int, ...] = ()
    pad: int = 0


def generate(
    model: Any,
    requests: Sequence[Request],
    decoding: Decoding,
    drive: Drive | None = None,
    *,
    first: int = 0,
    on_batch: Callable[[int], None] | None = None,
) -> list[Output]:
    """Run *requests* in the order given, *drive* following; return what each produced.

    Requests are numbered from *first*. *on_batch* hears how many requests of a batch are done.
    Raises `InputError` for a model that computes logits that are not numbers.
    """
    outputs: list[Output] = []
    with torch.inference_mode(), _greedy(model, decoding):
        for start in range(0, len(requests), decoding.batch_size):
            batch = requests[start : start + decoding.batch_size]
            outputs += _run(model, batch, decoding, drive, first + start)
            if on_batch is not None:
                on_batch(len(batch))
    return outputs


def ends_of(model: Any) -> tuple[int, ...]:
    """Return the tokens that end a request of *model*, as its checkpoint says."""
    found = model.generation_config.eos_token_id
    if found is None:
        found = model.config.get_text_config().eos_token_id
    return () if found is None else (found,) if isinstance(found, int) else tuple(found)


def pad_of(model: Any, tokenizer: Any) -> int:
    """Return the token that fills up prompts, 0 where nobody names one."""
    named = (model.generation_config.pad_token_id, getattr(tokenizer, "pad_token_id", None))
    return next((pad for pad in named if pad is not None), 0)


def _run(
    model: Any, batch: Sequence[Request], decoding: Decoding, drive: Drive | None, first: int
) -> list[Output]:
    width = max(len(request.prompt) for request in batch)
    blank = [width - len(request.prompt) for request in batch]
    ids = torch.tensor(
        [[decoding.pad] * n + list(r.prompt) for n, r in zip(blank, batch, strict=True)]
    )
    mask = torch.tensor([[0] * n + [1] * (width - n) for n in blank])
    watch = _Watch([_Follow(r) for r in batch], decoding.eos)
    if drive is not None:
        drive.requests(mask, eos=decoding.eos, first=first)
    model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=max(request.limit for request in batch),
        logits_processor=LogitsProcessorList([watch]),
    )
    return [follow.output() for follow in watch.follows]


@dataclass(slots=True)
class _Follow:
    """One request on its way."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    digest: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    done: bool = False
    greedy: bool = True

    def output(self) -> Output:
        tokens, nll = tuple(self.tokens), tuple(self.nll)
        return Output(tokens, nll, self.digest.hexdigest(), self.greedy)


class _Watch(LogitsProcessor):  # type: ignore[misc]  # transformers has no types
    """Sees the logits (B, vocabulary) of every step, and forces what is to be forced."""

    def __init__(self, follows: list[_Follow], eos: Sequence[int]) -> None:
        self.follows, self.eos = follows, eos

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logits = scores.detach().cpu()  # (B, V), float32
        array = logits.contiguous().numpy()
        likely = logits.argmax(-1).tolist()
        taken = [self._next(f, token) for f, token in zip(self.follows, likely, strict=True)]
        log_p = logits.double().log_softmax(-1)  # (B, V)
        for row, (follow, token) in enumerate(zip(self.follows, taken, strict=True)):
            if follow.done:
                continue
            follow.greedy = follow.greedy and token == likely[row]
            follow.digest.update(array[row].data)
            follow.tokens.append(token)
            follow.nll.append(_number(-float(log_p[row, token]), len(follow.tokens)))
            limit = len(follow.request.forced or ()) or follow.request.limit
            follow.done = token in self.eos or len(follow.tokens) >= limit
        if taken == likely:
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[torch.arange(len(taken)), torch.tensor(taken)] = 0
        return forced

    def _next(self, follow: _Follow, likely: int) -> int:
        """Return the token a request goes on with; one that is done ends, if it can."""
        forced, at = follow.request.forced, len(follow.tokens)
        if follow.done:
            return self.eos[0] if self.eos else likely
        return likely if forced is None else forced[at]


def _number(nll: float, token: int) -> float:
    """Return *nll*, of the token that is the *token*-th; raise `InputError` where it is NaN."""
    if math.isnan(nll):
        raise InputError(
            f"the model's logits for token {token} of an answer are not numbers (NaN)",
            way_out="look for weights that are NaN or infinite, in the checkpoint or the predictor",
        )
    return nll


@contextmanager
def _greedy(model: Any, decoding: Decoding) -> Iterator[None]:
    """Let `generate` decode greedily and nothing else, whatever the checkpoint recommends."""
    kept = model.generation_config
    model.generation_config = GenerationConfig(
        do_sample=False,
        use_cache=True,
        bos_token_id=kept.bos_token_id,
        eos_token_id=list(decoding.eos) or None,
        pad_token_id=decoding.pad,
    )
    try:
        yield
    finally:
        model.generation_config = kept
