"""This module teaches a predictor on one part of the prompts and measures it on another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moetier.traces.errors import InputError
from moetier.traces.predictors import create
from moetier.traces.predictors.base import ModelPredictor, Predictor
from moetier.traces.predictors.default_vector import VECTORS, QuasiHidden
from moetier.traces.predictors.hybrid import Hybrid
from moetier.traces.predictors.learn.evaluate import Measured, evaluate
from moetier.traces.predictors.learn.parts import ModelParts
from moetier.traces.predictors.learn.samples import Samples, Split
from moetier.traces.predictors.learn.vectors import default_vectors

GRADIENT_NORM = 0.5
"""Gradients are clipped to it, as SpecPrefetch's training does."""

Progress = Callable[[int, int], None]
Rows = Tensor | slice


@dataclass(frozen=True, slots=True)
class Settings:
    """How to fit by gradient descent (AdamW)."""

    epochs: int = 30
    patience: int = 3  # epochs without a better validation loss before it stops
    batch: int = 256  # tokens a step, each at all layers
    learning_rate: float = 1e-3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Trained:
    """A predictor that learnt, and what it reaches on held-out prompts."""

    predictor: ModelPredictor
    held_out: list[Measured]
    losses: list[float]  # validation loss before training and after each epoch; none if none


def train(
    predictor: Predictor,
    split: Split,
    parts: ModelParts,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Trained:
    """Teach *predictor* and return it with what it reaches on the held-out prompts.

    Its weights end up in the model's type. *progress* is told (epochs done, epochs at most).

    Raises:
        InputError: The predictor does not work inside a model, or not inside this one.
    """
    settings = settings or Settings()
    if not isinstance(predictor, ModelPredictor):
        raise InputError(
            f"predictor '{predictor.kind}' has nothing to learn from a model",
            way_out="use it on a trace as it is",
        )
    if parts.n_layers <= max(predictor.horizons):
        raise InputError(
            f"{parts.family} has {parts.n_layers} MoE layers: none is "
            f"{max(predictor.horizons)} after another",
            way_out="give smaller horizons",
        )
    losses: list[float] = []
    if isinstance(predictor, QuasiHidden):
        predictor.tensors = {VECTORS: default_vectors(split.train, parts)}
    if predictor.learns:
        losses = _fit(predictor, split, parts, settings, progress)
    stored = split.train.layers[0].residual.dtype
    predictor.tensors = {
        name: value.detach().to(stored).contiguous() for name, value in predictor.tensors.items()
    }
    if isinstance(predictor, Hybrid):
        _choose_layers(predictor, split.validation, parts)
    return Trained(predictor, evaluate(predictor, split.held_out, parts), losses)


def _choose_layers(predictor: Hybrid, samples: Samples, parts: ModelParts) -> None:
    everywhere = copy.copy(predictor)
    everywhere.layers = None
    default = create("default-vector")
    assert isinstance(default, ModelPredictor)
    default.tensors = predictor.tensors
    mine, other = (evaluate(each, samples, parts) for each in (everywhere, default))
    predictor.choose([m.recall_at_k for m in mine], [m.recall_at_k for m in other])


def _fit(
    predictor: ModelPredictor,
    split: Split,
    parts: ModelParts,
    settings: Settings,
    progress: Progress | None,
) -> list[float]:
    """Fit the weights of *predictor*; return the validation losses, the best of which is kept."""
    generator = torch.Generator().manual_seed(settings.seed)
    learnt = {
        name: value.requires_grad_()
        for name, value in predictor.initial(parts.geometry, generator).items()
    }
    predictor.tensors = {**predictor.tensors, **learnt}
    optimizer = torch.optim.AdamW(learnt.values(), lr=settings.learning_rate)
    losses = [_validation(predictor, split.validation, parts, settings.batch)]
    best = {name: value.detach().clone() for name, value in learnt.items()}
    since = 0
    for epoch in range(settings.epochs):
        order = torch.randperm(len(split.train), generator=generator)
        for start in range(0, len(order), settings.batch):
            rows = order[start : start + settings.batch]
            loss = _loss(predictor, split.train, parts, rows)
            # not backward(), which would also fill in gradients of the model it borrows from
            gradients = torch.autograd.grad(loss, list(learnt.values()))
            for value, gradient in zip(learnt.values(), gradients, strict=True):
                value.grad = gradient
            torch.nn.utils.clip_grad_norm_(learnt.values(), GRADIENT_NORM)
            optimizer.step()
        losses.append(_validation(predictor, split.validation, parts, settings.batch))
        if progress is not None:
            progress(epoch + 1, settings.epochs)
        if losses[-1] < min(losses[:-1]):
            best = {name: value.detach().clone() for name, value in learnt.items()}
            since = 0
        else:
            since += 1
        if since == settings.patience:
            break
    predictor.tensors = {**predictor.tensors, **best}
    return losses


def _loss(predictor: ModelPredictor, samples: Samples, parts: ModelParts, rows: Rows) -> Tensor:
    """Return the KL divergence from the routers to the predictions, a mean over layers.

    Horizons are added up, each with the predictor's own weight for it.
    """
    total = torch.zeros(())
    for horizon in predictor.horizons:
        pairs = parts.n_layers - horizon
        weight = predictor.loss_weights.get(horizon, 1.0) / pairs
        for layer in range(pairs):
            view = samples.view(layer, parts, rows)
            read = samples.layers[layer + horizon].router_input[rows]
            with torch.no_grad():
                teacher = parts.logits(layer + horizon, read).log_softmax(-1)
            made = predictor.trained(view, horizon).log_softmax(-1)
            loss = functional.kl_div(
                made, teacher.to(made.device), reduction="batchmean", log_target=True
            )
            total = total + weight * loss.cpu()
    return total


@torch.no_grad()
def _validation(
    predictor: ModelPredictor, samples: Samples, parts: ModelParts, batch: int
) -> float:
    total, n = 0.0, len(samples)
    for start in range(0, n, batch):
        rows = slice(start, min(start + batch, n))
        total += float(_loss(predictor, samples, parts, rows)) * (rows.stop - start)
    return total / n
