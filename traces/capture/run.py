"""This module captures a model's routing while it generates, and writes it as a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moetier.traces.batch import Floats
from moetier.traces.capture.header import build_header
from moetier.traces.capture.hidden import HiddenWriter, valid_rows
from moetier.traces.capture.hook import ExpertsCall, attach
from moetier.traces.capture.probe import Probe, probe
from moetier.traces.capture.rows import Progression, Tokens, rows
from moetier.traces.errors import InputError
from moetier.traces.io import TraceWriter
from moetier.traces.live import LivePredictor
from moetier.traces.predictors.base import Predictor
from moetier.traces.predictors.learn.parts import find_parts
from moetier.traces.predictors.learn.running import attached, batch_of


def capture(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    out: str | Path,
    *,
    max_new_tokens: int,
    batch_size: int = 1,
    hidden: bool = False,
    seed: int = 0,
    predictor: Predictor | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Generate greedily from *prompts* and write what *model* routed to *out*.

    A request's rows cover its prompt and what it generated, but for the last token: it is sampled
    and never forwarded. Padding and requests that ended before others of their batch keep their
    rows, marked invalid. The model is left as it was.

    Args:
        model: A causal transformers model, on any devices.
        tokenizer: Its tokenizer.
        prompts: The requests, numbered in this order.
        out: The trace; it appears when everything is captured.
        max_new_tokens: Tokens to generate for each prompt, fewer if it ends by itself.
        batch_size: Prompts that run together.
        hidden: Also store what each router read, see `moetier.traces.capture.hidden`.
        seed: Seeds torch for this call; the global state is put back.
        predictor: Runs beside the model; the trace carries what it predicts.
        progress: Called with (prompts done, prompts in all) after each batch.

    Raises:
        InputError: The model's routing cannot be seen, or the arguments cannot be used.
    """
    if max_new_tokens < 1 or batch_size < 1 or not prompts:
        raise InputError(
            f"{len(prompts)} prompts, {max_new_tokens} new tokens, batches of {batch_size}",
            way_out="give at least one of each",
        )
    encoded = _encode(tokenizer, prompts)
    was_training = bool(model.training)
    model.eval()
    try:
        with torch.random.fork_rng(), torch.no_grad(), _greedy(model, tokenizer):
            torch.manual_seed(seed)
            seen = probe(model)
            header = build_header(model, tokenizer, prompts, seen, seed)
            with ExitStack() as stack:
                running: LivePredictor | None = None
                if predictor is not None:
                    running = stack.enter_context(attached(predictor, model))
                    entries = predictor.entries(header.geometry)
                    header = header.model_copy(update={"predictors": entries})
                store = _Store.open(out, model, seen, stack) if hidden else None
                writer = stack.enter_context(TraceWriter(out, header))
                recorder = _Recorder(seen, writer, store, running)
                for first in range(0, len(encoded), batch_size):
                    batch = encoded[first : first + batch_size]
                    _generate(model, batch, first, max_new_tokens, recorder)
                    if progress is not None:
                        progress(first + len(batch), len(encoded))
    finally:
        model.train(was_training)
    return Path(out)


class _Recorder:
    """Writes the rows of each forward pass, counting passes over the whole trace."""

    def __init__(
        self,
        seen: Probe,
        writer: TraceWriter,
        store: _Store | None,
        predictor: LivePredictor | None,
    ) -> None:
        self.gate, self.writer, self.store, self.predictor = seen.gate, writer, store, predictor
        self.step = -1
        self.progression: Progression | None = None
        self.tokens: Tokens | None = None

    def on_forward(self, forward: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        input_ids = args[0] if args else kwargs.get("input_ids")
        if self.progression is None or not isinstance(input_ids, Tensor):
            raise InputError("a forward pass without input_ids", way_out="capture a text model")
        self.step += 1
        self.tokens = self.progression.advance(input_ids)

    def __call__(self, call: ExpertsCall) -> None:
        assert self.tokens is not None
        scores = None
        if self.gate is not None and call.scores is not None:
            scores = self.gate.select(call.scores, call.moe_layer)
        valid = torch.from_numpy(self.tokens.valid)
        predicted = {}
        if self.predictor is not None and valid.any():
            batch = batch_of(call, self.step, self.tokens, scores)
            made = self.predictor.predict(call, valid.nonzero()[:, 0], batch)
            predicted = {horizon: _spread(found, valid) for horizon, found in made.items()}
        row_values = rows(call, self.step, self.tokens, scores)
        self.writer.add(**row_values, predicted=predicted)
        if self.store is not None:
            self.store.add(self.step, call, valid)


class _Store:
    """Stores what each router reads, and the residual where it is found."""

    def __init__(self, writer: HiddenWriter, residuals: dict[int, Tensor]) -> None:
        self.writer, self.residuals = writer, residuals

    @classmethod
    def open(cls, out: str | Path, model: Any, seen: Probe, stack: ExitStack) -> _Store:
        try:
            residuals = stack.enter_context(find_parts(model, seen).residuals())
        except InputError:  # the family has no norm before its router: no predictor can use it
            residuals = {}
        return cls(stack.enter_context(HiddenWriter(out)), residuals)

    def add(self, step: int, call: ExpertsCall, valid: Tensor) -> None:
        if call.router_input is None:
            raise InputError(
                f"the router at '{call.where.name}' is not found, so what it reads is unknown",
                way_out="leave out --hidden",
            )
        residual = self.residuals.get(call.moe_layer)
        self.writer.add(
            step,
            call.moe_layer,
            valid_rows(call.router_input, valid),
            None if residual is None else valid_rows(residual, valid),
        )


def _spread(scores: Floats, valid: Tensor) -> Floats:
    """Return *scores* (V, E) as (T, E), not known where *valid* (T,) is not set."""
    spread = np.full((len(valid), scores.shape[1]), np.nan, np.float32)
    spread[valid.numpy()] = scores
    return spread


def _generate(
    model: Any, batch: Sequence[list[int]], first: int, max_new_tokens: int, recorder: _Recorder
) -> None:
    config = model.generation_config
    ids, mask = _pad(batch, config.pad_token_id)
    eos = config.eos_token_id
    ends = [] if eos is None else [eos] if isinstance(eos, int) else eos
    recorder.progression = Progression(first, mask, ends)
    with attach(model, recorder, recorder.on_forward):
        model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max_new_tokens,
        )


def _encode(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each prompt, before any of them runs."""
    encoded = [list(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    for number, ids in enumerate(encoded, start=1):
        if not ids:
            raise InputError(f"prompt {number} has no tokens", way_out="leave it out")
    return encoded


def _pad(batch: Sequence[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Return token ids and attention mask, (B, S) each, padded on the left."""
    width = max(len(ids) for ids in batch)
    return (
        torch.tensor([[pad] * (width - len(ids)) + ids for ids in batch]),
        torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in batch]),
    )


@contextmanager
def _greedy(model: Any, tokenizer: Any) -> Iterator[None]:
    """Let `generate` decode greedily and nothing else, whatever the checkpoint recommends."""
    from transformers import GenerationConfig

    kept = model.generation_config
    config = model.config.get_text_config()
    eos = kept.eos_token_id if kept.eos_token_id is not None else config.eos_token_id
    pad = next((pad for pad in (kept.pad_token_id, tokenizer.pad_token_id) if pad is not None), 0)
    model.generation_config = GenerationConfig(
        do_sample=False,
        use_cache=True,
        bos_token_id=kept.bos_token_id,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    try:
        yield
    finally:
        model.generation_config = kept
