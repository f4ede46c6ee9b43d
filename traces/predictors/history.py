"""This module turns shares of experts into scores, for predictors that only look at batches."""

from __future__ import annotations

from typing import Any

import numpy as np

from moetier.traces.batch import Floats, LayerBatch
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.traces.schema import ScoreKind

LEAST = 1e-6
"""The probability of an expert that was never seen, so that its logarithm is a number."""


def as_scores(shares: Any, score_kind: ScoreKind) -> Floats:
    """Return *shares* (..., E), each summing to one, as router scores of *score_kind*.

    Logits are their logarithms, so that a softmax gives the shares again; other kinds keep them.
    """
    made = np.log(np.maximum(shares, LEAST)) if score_kind == "logits" else shares
    return np.asarray(made, np.float32)


def count_experts(batch: LayerBatch, geometry: Geometry) -> Any:
    """Return how often *batch* uses each expert, (E,)."""
    return np.bincount(np.asarray(batch.experts, np.int64), minlength=geometry.n_experts)


def scores_of(batch: LayerBatch) -> Floats:
    """Return the router scores of *batch*; raise `InputError` where the source has none."""
    if batch.scores is None:
        raise InputError(
            f"step {batch.step}, MoE layer {batch.layer} carries no router scores",
            way_out="capture with scores and open the trace with them, "
            "or use popularity or recall-model",
        )
    return batch.scores
