"""This module finds out what a router's scores mean, from what the router did with them.

Routers return logits or probabilities and turn them into gate weights in their own ways. Instead
of a table of families, the few known ways are tried on real scores, ids and weights, and the one
that explains the weights is kept; a bias that only takes part in the choice is found by its name.

Shapes: T tokens, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from moetier.traces.capture.find import MoeLayer
from moetier.traces.errors import InputError
from moetier.traces.schema import ScoreKind

Base = Literal["softmax", "sigmoid", "given", "none"]
BIAS_NAMES = ("e_score_correction_bias", "expert_bias", "balancing_biases")


@dataclass(frozen=True, slots=True)
class Sample:
    """What one MoE layer did with some tokens: scores (T, E), ids and weights (T, K)."""

    moe_layer: int
    scores: Tensor
    ids: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Gate:
    """How a model's routers choose and weigh experts.

    `score_kind` names what `select` returns: "logits"; "probabilities", a softmax, plus the
    layer's bias where there is one; or "sigmoid", also plus the bias. The largest of them are the
    experts the router picks, unless it limits itself to groups of experts.
    """

    score_kind: ScoreKind
    base: Base = "none"  # what the gate weights are made of; "none": not one of the known ways
    normalised: bool = False  # are the weights divided by their sum?
    scale: float = 1.0  # and then multiplied by this
    biases: tuple[Tensor | None, ...] = ()  # (E,) per MoE layer, added for the choice only
    expert_scales: tuple[Tensor | None, ...] = ()  # (E,) per MoE layer, of the weights

    def select(self, scores: Tensor, moe_layer: int) -> Tensor:
        """Return the float32 values (T, E) of which the router of *moe_layer* picks the largest."""
        bias = self.biases[moe_layer] if self.biases else None
        if self.score_kind == "logits" or self.base == "none":
            return scores.float()
        values = _apply(self.base, scores)
        return values if bias is None else values + bias.to(values.device, values.dtype)

    def weigh(self, scores: Tensor, ids: Tensor, moe_layer: int) -> Tensor:
        """Return the (T, K) float32 weights that the router would give to any *ids*.

        Raises `InputError` where the way the weights are made is not known.
        """
        if self.base == "none":
            raise InputError(
                "how this router weighs experts is not known",
                way_out="use a policy that keeps the router's own choice",
            )
        weights = _pick(self.base, scores, ids, self.normalised) * self.scale
        scales = self.expert_scales[moe_layer] if self.expert_scales else None
        return weights if scales is None else weights * scales.to(weights.device)[ids].float()


def identify(layers: Sequence[MoeLayer], samples: Sequence[Sample]) -> Gate:
    """Return the gate that explains *samples*, taken from a forward pass over *layers*."""
    biases = tuple(_named(layer, BIAS_NAMES) for layer in layers)
    scales = tuple(_named(layer, ("per_expert_scale",)) for layer in layers)
    given = all(_are_probabilities(sample.scores) for sample in samples)
    bases: tuple[Base, ...] = ("given",) if given else ("softmax", "sigmoid")
    fits: list[tuple[float, float, Base, bool]] = [
        (*_fit(base, normalised, samples, scales), base, normalised)
        for base in bases
        for normalised in (True, False)
    ]
    error, scale, best, normalised = min(fits, key=lambda fit: fit[0])
    loose = any(sample.weights.dtype != torch.float32 for sample in samples)
    if error > (3e-2 if loose else 1e-3):
        consistent = all(_chooses_largest(sample) for sample in samples)
        kind: ScoreKind = "probabilities" if given else "logits" if consistent else "unknown"
        return Gate(kind)
    if best == "sigmoid":
        kind = "sigmoid"
    else:
        biased = any(bias is not None for bias in biases)
        kind = "probabilities" if given or biased else "logits"
    return Gate(kind, best, normalised, scale, biases, scales)


def _fit(
    base: Base, normalised: bool, samples: Sequence[Sample], scales: Sequence[Tensor | None]
) -> tuple[float, float]:
    """Return the largest relative error and the common factor of one way to weigh."""
    errors, ratios, pairs = [], [], []
    for sample in samples:
        made = _pick(base, sample.scores, sample.ids, normalised)
        scale = scales[sample.moe_layer]
        if scale is not None:
            made = made * scale.float().to(made.device)[sample.ids]
        wanted = sample.weights.float()
        pairs.append((made, wanted))
        ratios.append((wanted / made.clamp_min(1e-30)).flatten())
    factor = float(torch.cat(ratios).median())
    for made, wanted in pairs:
        errors.append(
            float((made * factor - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
        )
    return max(errors), 1.0 if abs(factor - 1) < 1e-2 else factor


def _pick(base: Base, scores: Tensor, ids: Tensor, normalised: bool) -> Tensor:
    weights = _apply(base, scores).gather(1, ids.long())
    return weights / weights.sum(-1, keepdim=True) if normalised else weights


def _apply(base: Base, scores: Tensor) -> Tensor:
    scores = scores.float()
    if base == "softmax":
        return scores.softmax(-1)
    return scores.sigmoid() if base == "sigmoid" else scores


def _are_probabilities(scores: Tensor) -> bool:
    scores = scores.float()
    return bool((scores >= 0).all() and ((scores.sum(-1) - 1).abs() < 1e-2).all())


def _chooses_largest(sample: Sample) -> bool:
    """Tell whether the chosen experts are those with the largest scores, ties aside."""
    scores = sample.scores.float()
    worst = scores.gather(1, sample.ids.long()).min(-1).values
    return bool(((scores > worst[:, None]).sum(-1) < sample.ids.shape[1]).all())


def _named(layer: MoeLayer, names: tuple[str, ...]) -> Tensor | None:
    """Return the (E,) tensor of that name in the router or beside it."""
    places: list[nn.Module] = [part for part in (layer.router, layer.block) if part is not None]
    for place in places:
        for name, value in (*place.named_buffers(), *place.named_parameters()):
            if name.rpartition(".")[2] in names and value.numel() == layer.n_experts:
                return value.detach().reshape(-1)
    return None
