"""This module defines the unit a source hands on: one MoE layer of one forward step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from moetier.traces.schema import Header

PREFILL, DECODE = 0, 1
PHASES = ("prefill", "decode")

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@dataclass(slots=True)
class LayerBatch:
    """What one MoE layer of one forward step asks for, all its tokens together.

    `experts` is token-major, padding and invalid tokens already removed; every token contributes
    its ids in slot order. `tokens` gives the token of each entry of `experts`, and is None when
    each token has exactly `len(experts) // n_tokens` of them. Arrays are None when the source does
    not have them; a missing value is never zero.
    """

    step: int  # forward pass, counted over the whole source
    phase: int  # PREFILL or DECODE
    layer: int  # index among the MoE layers, from 0
    n_tokens: int
    context: int  # key/value entries read, summed over the tokens: sum of (position + 1)
    experts: list[int]
    weights: Floats | None = None  # (len(experts),) gate weight of each entry
    tokens: list[int] | None = None  # (len(experts),) token of each entry, 0..n_tokens-1
    requests: list[int] | None = None  # (n_tokens,) request of each token
    scores: Floats | None = None  # (n_tokens, n_experts) router scores, of the header's score_kind
    predicted: dict[int, Floats] = field(default_factory=dict)
    # horizon -> (n_tokens, n_experts): predicted scores of the MoE layer `layer + horizon`
    recorded: list[int] | None = (
        None  # (len(experts),) what a device did: 0 miss, 1 hit, 2 prefetched
    )
    predict: Callable[[LayerBatch], dict[int, Floats]] | None = None
    # a live model's predictor, to be asked once it is settled which experts are computed
    screen: Callable[[LayerBatch], Bools] | None = None
    # a live model's channel selection: (len(experts), channels), which ones each entry keeps

    def token_ids(self) -> list[int]:
        """Return the token of each entry of `experts`, also where all tokens have equally many."""
        if self.tokens is not None:
            return self.tokens
        each = len(self.experts) // max(self.n_tokens, 1)
        return [token for token in range(self.n_tokens) for _ in range(each)]


class Source(Protocol):
    """Where batches come from: a trace file, a generator of synthetic routing, or a live model."""

    @property
    def header(self) -> Header:
        """The header: geometry, bytes and provenance."""
        ...

    def batches(self) -> Iterator[LayerBatch]:
        """Yield the batches in forward order: by step, then by MoE layer. Can be called again."""
        ...
