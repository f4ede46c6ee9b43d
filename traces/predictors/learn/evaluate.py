"""This module measures a predictor on tokens that it did not learn from.

Shapes: N tokens, E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moetier.traces.predictors.base import ModelPredictor
from moetier.traces.predictors.learn.parts import ModelParts
from moetier.traces.predictors.learn.samples import Samples

AT_ONCE = 4096
"""Tokens measured together."""


@dataclass(frozen=True, slots=True)
class Measured:
    """How well one MoE layer is predicted; every figure is a mean over tokens.

    The cosines compare a guess of what its router reads with what it reads: of the residual
    `horizon` layers before through its own norm, and of the quasi-hidden state, where there is one.
    """

    layer: int  # the MoE layer that is predicted
    horizon: int  # from how many layers before
    n_tokens: int
    recall_at_k: float  # share of the router's experts among the k predicted ones
    recall_at_2k: float
    exact_set: float  # share of tokens whose k experts are all predicted
    cosine_r: float
    cosine_q: float | None


@torch.no_grad()
def evaluate(predictor: ModelPredictor, samples: Samples, parts: ModelParts) -> list[Measured]:
    """Return what *predictor* reaches on *samples*, per horizon and predicted layer."""
    return [
        _measure(predictor, samples, parts, layer, horizon)
        for horizon in predictor.horizons
        for layer in range(parts.n_layers - horizon)
    ]


def summary(found: list[Measured]) -> list[dict[str, Any]]:
    """Return the means over the layers, one mapping per horizon."""
    names = ("recall_at_k", "recall_at_2k", "exact_set", "cosine_r", "cosine_q")
    made = []
    for horizon in sorted({item.horizon for item in found}):
        rows = [asdict(item) for item in found if item.horizon == horizon]
        means = {
            name: None
            if any(row[name] is None for row in rows)
            else sum(row[name] for row in rows) / len(rows)
            for name in names
        }
        made.append({"horizon": horizon, **means})
    return made


def recall(scores: Tensor, ids: Tensor, among: int) -> Tensor:
    """Return the share (N,) of *ids* (N, K) that are among the largest *scores* (N, E)."""
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen.scatter_(1, scores.topk(min(among, scores.shape[1])).indices, True)
    return chosen.gather(1, ids.long()).float().mean(1)


def _measure(
    predictor: ModelPredictor, samples: Samples, parts: ModelParts, layer: int, horizon: int
) -> Measured:
    target, n = layer + horizon, len(samples)
    truth = samples.layers[target]
    k = truth.ids.shape[1]
    sums = torch.zeros(5, dtype=torch.float64)
    has_q = False
    for start in range(0, n, AT_ONCE):
        rows = slice(start, start + AT_ONCE)
        view = samples.view(layer, parts, rows)
        scores = parts.scores(target, predictor.logits(view, horizon)).cpu()
        ids, read = truth.ids[rows], truth.router_input[rows]
        found = recall(scores, ids, k)
        q = predictor.state(view, horizon) if predictor.guesses else None
        has_q = q is not None
        figures = (
            found,
            recall(scores, ids, 2 * k),
            (found == 1).float(),
            _cosine(parts.norm(target, view.residual), read),
            found if q is None else _cosine(q, read),
        )
        sums += torch.stack([figure.double().sum() for figure in figures])
    at_k, at_2k, exact, cosine_r, cosine_q = (sums / max(n, 1)).tolist()
    return Measured(target, horizon, n, at_k, at_2k, exact, cosine_r, cosine_q if has_q else None)


def _cosine(made: Tensor, wanted: Tensor) -> Tensor:
    return functional.cosine_similarity(made.float().cpu(), wanted.float().cpu(), dim=1)
