"""This module chooses experts from router scores, as a model's own gate would, in plain numpy.

It is for scores that no router acted on: predictions, and what a policy makes of them. What the
router itself chose is never recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moetier.traces.batch import Floats
from moetier.traces.errors import InputError
from moetier.traces.schema import Header, ScoreKind

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GateRule:
    """How scores become experts and weights: the *top_k* largest, perhaps renormalised.

    Logits go through a softmax first. A bias that only takes part in the choice is part of the
    scores of some families; their weights then carry it, which a live model's own gate would not.
    """

    top_k: int
    score_kind: ScoreKind
    normalised: bool

    @classmethod
    def of(cls, header: Header) -> GateRule:
        """Return the rule of the model of *header*; unknown normalisation counts as none."""
        return cls(header.geometry.top_k, header.score_kind, bool(header.geometry.norm_topk))

    def probabilities(self, scores: Floats) -> Floats:
        """Return scores (V, E) as non-negative shares (V, E) that can be added over tokens.

        Predictions made for a trace without scores are shares already.
        """
        if self.score_kind == "unknown":
            raise InputError(
                "the trace does not say what its scores mean", way_out="capture it again"
            )
        if self.score_kind != "logits":
            return scores
        shifted = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares: Floats = shifted / shifted.sum(axis=1, keepdims=True)
        return shares

    def choose(self, scores: Floats) -> tuple[Ints, Floats]:
        """Return ids and weights (V, K) of the largest *scores* (V, E), ties to the lower id."""
        ids: Ints = np.argsort(-scores, axis=1, kind="stable")[:, : self.top_k]
        return ids, self.weigh(scores, ids)

    def weigh(self, scores: Floats, ids: Ints) -> Floats:
        """Return the weights (V, K) that *scores* (V, E) give to any *ids* (V, K)."""
        if self.normalised:
            # Of some logits alone the softmax is that of all, divided by their sum; and it cannot
            # vanish however far below the largest they are.
            weights = self.probabilities(np.take_along_axis(scores, ids, axis=1))
            weights = weights / weights.sum(axis=1, keepdims=True)
        else:
            weights = np.take_along_axis(self.probabilities(scores), ids, axis=1)
        return weights.astype(np.float32)
