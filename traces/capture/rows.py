"""This module turns what the experts were asked into the rows of a trace."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moetier.traces.batch import DECODE, PREFILL
from moetier.traces.capture.hook import ExpertsCall
from moetier.traces.errors import InputError


@dataclass(slots=True)
class Tokens:
    """The tokens of one forward pass, batch-major: (T,) each."""

    request: npt.NDArray[np.int32]
    position: npt.NDArray[np.int32]
    valid: npt.NDArray[np.bool_]
    phase: int


class Progression:
    """Follows a padded batch of B requests through its forward passes.

    Positions count a request's own tokens, so padding has none: it gets 0 and is invalid. A request
    is finished once it was given an end-of-sequence token that it generated: that token is the
    last it sampled, which alone would never be forwarded.
    """

    def __init__(self, first_request: int, mask: Tensor, eos: Collection[int]) -> None:
        """Start with the left-padded attention *mask* (B, S) of the prompts."""
        self.mask = mask.bool().cpu().numpy()  # (B, S)
        self.lengths = self.mask.sum(-1)
        self.eos = list(eos)
        self.seen = 0  # columns forwarded
        batch = len(self.mask)
        self.requests = np.arange(first_request, first_request + batch, dtype=np.int32)
        self.finished = np.zeros(batch, dtype=np.bool_)

    def advance(self, input_ids: Tensor) -> Tokens:
        """Return the tokens of a forward pass over *input_ids* (B, N)."""
        ids = input_ids.cpu().numpy()
        width = self.mask.shape[1]
        start, end = self.seen, self.seen + ids.shape[1]
        self.seen = end
        if start < width < end or (start >= width and ids.shape[1] > 1):
            raise InputError(
                f"a forward pass took columns {start} to {end} of prompts {width} wide",
                way_out="capture a model that decodes one token at a time with a cache",
            )
        if start < width:
            valid = self.mask[:, start:end]
            counted = self.mask.cumsum(-1)[:, start:end] - 1
            position = np.where(valid, counted, 0)
        else:
            self.finished |= np.isin(ids[:, 0], self.eos)
            valid = ~self.finished[:, None]
            position = (self.lengths + start - width)[:, None]
        return Tokens(
            np.repeat(self.requests, ids.shape[1]),
            position.astype(np.int32).reshape(-1),
            valid.reshape(-1),
            PREFILL if start < width else DECODE,
        )


def rows(call: ExpertsCall, step: int, tokens: Tokens, scores: Tensor | None) -> dict[str, Any]:
    """Return what `TraceWriter.add` takes for one MoE layer of forward pass *step*.

    *scores* are (T, E), or None where the model's are not to be had.
    """
    count = len(tokens.valid)
    if len(call.ids) != count:
        raise InputError(
            f"MoE layer {call.moe_layer} got {len(call.ids)} tokens where the forward pass has "
            f"{count}",
            way_out="capture a model whose layers see every token",
        )
    return {
        "request": tokens.request,
        "phase": tokens.phase,
        "step": step,
        "position": tokens.position,
        "moe_layer": call.moe_layer,
        "experts": call.ids.to("cpu", torch.int16).numpy(),
        "weights": _known(call.weights, tokens),
        "scores": None if scores is None else _known(scores, tokens),
        "valid": tokens.valid,
    }


def _known(values: Tensor, tokens: Tokens) -> npt.NDArray[np.float32]:
    """Return *values* with the rows of invalid tokens, which may hold anything, as not known."""
    array = values.detach().to("cpu", torch.float32).numpy()
    return np.where(tokens.valid[:, None], array, np.float32(np.nan))
