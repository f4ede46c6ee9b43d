"""This module runs a model once on a few tokens to learn how it routes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from moetier.traces.capture.find import MoeLayer
from moetier.traces.capture.gate import Gate, Sample, identify
from moetier.traces.capture.hook import ExpertsCall, attach
from moetier.traces.errors import InputError
from moetier.traces.schema import ScoreKind

PROBE_TOKENS = 16


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """What a forward pass over a few tokens showed."""

    layers: list[MoeLayer]
    n_experts: int
    top_k: int
    gate: Gate | None  # None: the routers' scores are not to be had
    weights_sum_to_one: bool

    @property
    def score_kind(self) -> ScoreKind:
        """Return what the scores in a trace of this model are."""
        return "none" if self.gate is None else self.gate.score_kind


def probe(model: nn.Module) -> Probe:
    """Run *model* on fixed token ids; raise `InputError` for one whose routing cannot be seen."""
    calls: list[ExpertsCall] = []
    embeddings = model.get_input_embeddings()  # type: ignore[operator]  # of every HF model
    vocab = int(embeddings.num_embeddings)
    tokens = (torch.arange(PROBE_TOKENS) * 7919 + 13) % vocab  # spread over the vocabulary
    with torch.no_grad(), attach(model, calls.append) as layers:
        model(input_ids=tokens[None].to(_device(model)), use_cache=False)
    experts = {layer.n_experts for layer in layers}
    top_k = {call.ids.shape[1] for call in calls}
    if len(experts) > 1 or len(top_k) > 1:
        raise InputError(
            f"the MoE layers of {type(model).__name__} differ: {sorted(experts)} experts, "
            f"top {sorted(top_k)}; a trace holds one number of each"
        )
    weights = torch.cat([call.weights.float().cpu() for call in calls])
    return Probe(
        layers,
        experts.pop(),
        top_k.pop(),
        _gate(layers, calls),
        bool(((weights.sum(-1) - 1).abs() < 2e-2).all()),
    )


def _gate(layers: list[MoeLayer], calls: list[ExpertsCall]) -> Gate | None:
    samples = [
        Sample(call.moe_layer, call.scores.cpu(), call.ids.cpu(), call.weights.cpu())
        for call in calls
        if call.scores is not None and len(call.scores) == len(call.ids)
    ]
    return identify(layers, samples) if len(samples) == len(layers) else None


def _device(model: nn.Module) -> torch.device:
    device = getattr(model, "device", None)
    return device if isinstance(device, torch.device) and device.type != "meta" else _first(model)


def _first(model: nn.Module) -> torch.device:
    return next(
        (p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu")
    )
