"""This module runs a predictor inside a model, as the source of a live model's predictions.

Shapes: T tokens of a forward pass; V of them valid; K experts per token; H hidden; E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moetier.traces.batch import Floats, LayerBatch
from moetier.traces.capture.hook import ExpertsCall
from moetier.traces.capture.rows import Tokens
from moetier.traces.errors import InputError
from moetier.traces.predictors.base import BatchPredictor, ModelPredictor, Predictor, View
from moetier.traces.predictors.learn.parts import ModelParts, find_parts


class Running:
    """A predictor inside a model: a `LivePredictor` of `moetier.traces.live`."""

    def __init__(
        self, predictor: ModelPredictor, parts: ModelParts, residuals: dict[int, Tensor]
    ) -> None:
        """Run *predictor* with *parts*; *residuals* holds each layer's latest (T, H)."""
        self.predictor, self.parts, self.residuals = predictor, parts, residuals

    def predict(self, call: ExpertsCall, valid: Tensor, batch: LayerBatch) -> dict[int, Floats]:
        """Return scores (V, E) by horizon, from what *batch* says is really executed."""
        return predictions(self.predictor, self.view(call, valid, batch))

    def view(self, call: ExpertsCall, valid: Tensor, batch: LayerBatch) -> View:
        """Return what the predictor sees of *call*, whose *valid* (V,) rows belong to *batch*."""
        residual = self.residuals.get(call.moe_layer)
        if residual is None or call.router_input is None or len(residual) != len(call.ids):
            raise InputError(
                f"the residual of MoE layer {call.moe_layer} was not seen",
                way_out="predict within `attached(...)`, during a forward pass of that model",
            )
        rows = valid.to(residual.device)
        ids, weights = executed(batch)
        return View(
            call.moe_layer,
            residual[rows],
            call.router_input[rows.to(call.router_input.device)].to(residual.device),
            torch.from_numpy(ids).to(residual.device),
            torch.from_numpy(weights).to(residual.device),
            self.parts,
        )


class RunningOnBatches:
    """A predictor that looks at batches only, inside a model."""

    def __init__(self, predictor: BatchPredictor) -> None:
        """Run *predictor*, which was started."""
        self.predictor = predictor

    def predict(self, call: ExpertsCall, valid: Tensor, batch: LayerBatch) -> dict[int, Floats]:
        """Return scores (V, E) by horizon; *batch* is what the next predictions look back at."""
        del call, valid
        made = self.predictor.predict(batch, {})
        self.predictor.observe(batch)
        return made


@contextmanager
def attached(
    predictor: Predictor, model: Any, parts: ModelParts | None = None
) -> Iterator[Running | RunningOnBatches]:
    """Let *predictor* see the residuals of *model* until the block ends; then no hook is left.

    *parts* are found once per model where not given. Raises `InputError` for a family whose parts
    are not found, and for a predictor that needs the future.
    """
    if predictor.needs == "future":
        raise InputError(
            f"'{predictor.kind}' knows the future of a recorded trace, a running model has none",
            way_out="use it on a trace, or another predictor here",
        )
    if isinstance(predictor, BatchPredictor):
        from moetier.traces.capture.describe import describe
        from moetier.traces.capture.probe import probe

        seen = parts.seen if parts is not None else probe(model)
        predictor.start(describe(model, seen), seen.score_kind)
        yield RunningOnBatches(predictor)
        return
    assert isinstance(predictor, ModelPredictor)
    parts = parts or find_parts(model)
    check_tensors(predictor, parts)
    with parts.residuals() as residuals:
        yield Running(predictor, parts, residuals)


@torch.no_grad()
def predictions(predictor: Predictor, view: View) -> dict[int, Floats]:
    """Return what *predictor* says of *view*, as arrays (V, E) by horizon."""
    assert isinstance(predictor, ModelPredictor)
    made = predictor.predict(view)
    return {horizon: scores.float().cpu().numpy() for horizon, scores in made.items()}


def check_tensors(predictor: Predictor, parts: ModelParts) -> None:
    """Raise `InputError` unless *predictor* has its weights, in the sizes of the model."""
    for horizon in predictor.horizons:
        for name, shape in predictor.shapes(parts.geometry, horizon).items():
            tensor = predictor.tensors.get(name)
            if tensor is None:
                raise InputError(
                    f"predictor '{predictor.kind}' is not trained: it has no {name}",
                    way_out="`moetier train-predictor` makes a checkpoint of it",
                )
            if tuple(tensor.shape) != shape:
                raise InputError(
                    f"predictor '{predictor.kind}': {name} is {tuple(tensor.shape)}, "
                    f"{parts.family} needs {shape}",
                    way_out="train it on this model",
                )


def batch_of(call: ExpertsCall, step: int, tokens: Tokens, scores: Tensor | None) -> LayerBatch:
    """Return *call* of forward pass *step* as a batch of its valid *tokens*; *scores* (T, E)."""
    valid = torch.from_numpy(tokens.valid)
    return LayerBatch(
        step=step,
        phase=tokens.phase,
        layer=call.moe_layer,
        n_tokens=int(valid.sum()),
        context=int((tokens.position[tokens.valid].astype(np.int64) + 1).sum()),
        experts=call.ids.cpu()[valid].reshape(-1).tolist(),
        weights=call.weights.detach().cpu()[valid].reshape(-1).float().numpy(),
        requests=tokens.request[tokens.valid].tolist(),
        scores=None if scores is None else scores.detach().cpu()[valid].float().numpy(),
    )


def executed(batch: LayerBatch) -> tuple[Any, Floats]:
    """Return ids and weights (V, K) of what *batch* executes; unused places have weight 0."""
    if batch.weights is None:
        raise InputError(
            "a batch without gate weights", way_out="record weights, or use a live model"
        )
    if batch.tokens is None and batch.n_tokens:
        shape = (batch.n_tokens, len(batch.experts) // batch.n_tokens)
        ids = np.asarray(batch.experts, np.int64).reshape(shape)
        return ids, np.array(batch.weights, np.float32).reshape(shape)
    token = np.asarray(batch.token_ids(), np.int64)
    order = np.argsort(token, kind="stable")
    counts = np.bincount(token, minlength=batch.n_tokens)
    place = np.arange(len(token)) - np.repeat(np.cumsum(counts) - counts, counts)
    width = int(counts.max(initial=1))
    ids = np.zeros((batch.n_tokens, width), np.int64)
    weights = np.zeros((batch.n_tokens, width), np.float32)
    ids[token[order], place] = np.asarray(batch.experts, np.int64)[order]
    weights[token[order], place] = np.asarray(batch.weights, np.float32)[order]
    return ids, weights
