"""This module makes a running model a source: its forward pass pushes batches and does as told.

A trace replays what was decided; a live model asks. Before each MoE layer computes, the batch it is
about to compute goes to a callback, and the model computes with what comes back: other experts,
other weights, or just what it wanted. The hooks are those of `traces.capture`, so every family that
can be captured can be driven, through the experts implementation it already had.

Shapes: T tokens of a forward pass, padding included; V of them valid; K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from moetier.traces.batch import Bools, Floats, LayerBatch
from moetier.traces.capture.hook import ExpertsCall, Override, attach
from moetier.traces.capture.probe import Probe
from moetier.traces.capture.rows import Progression, Tokens
from moetier.traces.errors import InputError


@dataclass(frozen=True, slots=True)
class Choice:
    """What a model shall compute in place of what its router chose, entry by entry.

    `tokens` counts the valid tokens of the batch from 0. An expert that a token shall not use is
    left out, or has weight 0; a token may have more or fewer experts than the model's top-k.
    """

    tokens: Sequence[int]
    experts: Sequence[int]
    weights: Floats


Decide = Callable[[LayerBatch], Choice | None]
"""Called before each MoE layer computes; None lets the model do what it was about to do."""


class LivePredictor(Protocol):
    """Predicts, while a model runs, what the routers of later layers will say."""

    def predict(self, call: ExpertsCall, valid: Tensor, batch: LayerBatch) -> dict[int, Floats]:
        """Return scores (V, E) by horizon, in the header's `score_kind`.

        *call* is what the layer is about to compute, *valid* (V,) its valid rows; *batch* holds
        the experts and weights that are really computed, which may be others than the router's.
        """
        ...


class LiveScreen(Protocol):
    """Says, while a model runs, which channels of its experts matter, and lets it compute these."""

    def screen(self, call: ExpertsCall, valid: Tensor, batch: LayerBatch) -> Bools:
        """Return which channels each entry of *batch* keeps, (entries, channels).

        *call*, *valid* and *batch* are as for `LivePredictor.predict`.
        """
        ...


class LiveModel:
    """A transformers model behind the experts interface, driven layer by layer.

    `step` counts its forward passes over all calls of `driven`, as in a trace.
    """

    def __init__(
        self,
        model: Any,
        seen: Probe,
        predictor: LivePredictor | None = None,
        *,
        with_scores: bool = True,
        screen: LiveScreen | None = None,
    ) -> None:
        """Drive *model*, which `probe` has *seen*; *predictor* fills the batches' `predicted`.

        *screen* is theirs, where experts read channels.
        Without *with_scores* the batches carry no router scores, which not every policy reads.
        """
        self.model, self.seen, self.predictor = model, seen, predictor
        self.with_scores, self.screen = with_scores, screen
        self.step = -1

    @contextmanager
    def driven(self, decide: Decide) -> Iterator[Drive]:
        """Let *decide* rule every forward pass until the block ends; then the model is as it was.

        Tell the `Drive` what each generation runs on, before it starts.
        """
        drive = Drive(self, decide)
        with attach(self.model, drive.observe, drive.begin):
            yield drive


class Drive:
    """Follows a driven model from one padded batch of requests to the next."""

    def __init__(self, live: LiveModel, decide: Decide) -> None:
        """Ask *decide*; `requests` has to be called before the first forward pass."""
        self._live, self._decide = live, decide
        self._gate = live.seen.gate if live.with_scores else None
        self._progression: Progression | None = None
        self._tokens: Tokens | None = None
        self._valid = torch.empty(0, dtype=torch.long)  # (V,) rows of the valid tokens
        self._all_valid = False
        self._context = 0
        self._requests: list[int] = []

    def requests(self, mask: Tensor, *, eos: Collection[int] = (), first: int = 0) -> None:
        """Expect the forward passes of new requests, numbered from *first*.

        *mask* is the left-padded attention mask (B, S) of their prompts, *eos* the tokens that
        finish a request. Padding and finished requests reach no batch; they compute what the model
        wants.
        """
        self._progression = Progression(first, mask, eos)

    def begin(self, forward: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of a forward pass: which of its tokens are whose."""
        input_ids = args[0] if args else kwargs.get("input_ids")
        if self._progression is None or not isinstance(input_ids, Tensor):
            raise InputError("a forward pass without input_ids", way_out="drive a text model")
        self._live.step += 1
        self._tokens = tokens = self._progression.advance(input_ids)
        self._valid = torch.from_numpy(np.flatnonzero(tokens.valid))
        self._all_valid = len(self._valid) == len(tokens.valid)
        self._context = int((tokens.position[tokens.valid].astype(np.int64) + 1).sum())
        self._requests = tokens.request[tokens.valid].tolist()

    def observe(self, call: ExpertsCall) -> Override | None:
        """Ask what the experts shall compute; None leaves the model's own tensors untouched."""
        tokens = self._tokens
        if tokens is None or len(call.ids) != len(tokens.valid):
            raise InputError(
                f"MoE layer {call.moe_layer} got {len(call.ids)} tokens, another number than the "
                "forward pass",
                way_out="drive a model whose layers see every token",
            )
        if not len(self._valid):
            return None
        batch = self._batch(call, tokens)
        choice = self._decide(batch)
        if choice is None:
            return None
        if choice.experts is batch.experts and self._all_valid:  # other weights only
            return call.ids, torch.as_tensor(choice.weights).reshape(call.weights.shape)
        return self._override(call, choice)

    def _batch(self, call: ExpertsCall, tokens: Tokens) -> LayerBatch:
        gate, predictor, screen = self._gate, self._live.predictor, self._live.screen
        scores = None
        if gate is not None and call.scores is not None:
            scores = self._numpy(gate.select(call.scores, call.moe_layer))
        ids = call.ids if self._all_valid else call.ids[self._valid.to(call.ids.device)]
        return LayerBatch(
            step=self._live.step,
            phase=tokens.phase,
            layer=call.moe_layer,
            n_tokens=len(self._valid),
            context=self._context,
            experts=ids.reshape(-1).tolist(),
            weights=self._numpy(call.weights).reshape(-1),
            requests=self._requests,
            scores=scores,
            predict=None if predictor is None else partial(predictor.predict, call, self._valid),
            screen=None if screen is None else partial(screen.screen, call, self._valid),
        )

    def _numpy(self, values: Tensor) -> Floats:
        """Return a copy of the rows of the valid tokens."""
        picked = values if self._all_valid else values[self._valid.to(values.device)]
        array: Floats = picked.detach().to("cpu", torch.float32, copy=self._all_valid).numpy()
        return array

    def _override(self, call: ExpertsCall, choice: Choice) -> Override:
        """Return ids and weights (T, K'): the choice for valid tokens, the model's own elsewhere.

        Unused places repeat expert 0 with weight 0: the sentinel id for no expert is not safe in
        every implementation.
        """
        valid = self._valid
        tokens = np.asarray(choice.tokens, np.int64)
        counts = np.bincount(tokens, minlength=len(valid))
        own = 1 if self._all_valid else call.ids.shape[1]
        width = max(own, int(counts.max(initial=0)))
        ids = torch.zeros((len(call.ids), width), dtype=call.ids.dtype)
        weights = torch.zeros((len(call.ids), width), dtype=call.weights.dtype)
        if not self._all_valid:
            ids[:, :own], weights[:, :own] = call.ids.cpu(), call.weights.cpu()
            ids[valid], weights[valid] = 0, 0
        order = np.argsort(tokens, kind="stable")
        token = tokens[order]
        place = np.arange(len(token)) - np.repeat(np.cumsum(counts) - counts, counts)
        at = valid[torch.from_numpy(token)], torch.from_numpy(place)
        ids[at] = torch.as_tensor(np.asarray(choice.experts, np.int64)[order], dtype=ids.dtype)
        weights[at] = torch.as_tensor(choice.weights[order], dtype=weights.dtype)
        return ids, weights
