"""This module checks on a forward pass that what is captured is what the model does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from moetier.traces.capture.find import MoeLayer
from moetier.traces.capture.hook import ExpertsCall, attach
from moetier.traces.capture.probe import probe
from moetier.traces.capture.rebuild import rebuild


@dataclass(frozen=True, slots=True)
class LayerCheck:
    """What held for one MoE layer; None where a check does not apply to the family."""

    moe_layer: int
    output_error: (
        float  # largest difference of the rebuilt experts' output, relative to its largest
    )
    logits_error: float | None  # the same for the router's logits, recomputed from its weight
    ids_are_largest: bool | None  # are the ids the largest of the scores?
    weights_error: float | None  # relative difference of the weights remade from scores and ids


def self_check(model: Any, inputs: Mapping[str, Any]) -> list[LayerCheck]:
    """Run *model* on *inputs* (keywords of its forward) and check every MoE layer.

    Raises `InputError` when the model's routing cannot be seen.
    """
    gate = probe(model).gate
    calls: list[ExpertsCall] = []
    outputs: dict[int, Tensor] = {}
    with torch.no_grad(), attach(model, calls.append) as layers:
        handles = [_keep(where, outputs) for where in layers]
        try:
            model(**inputs)
        finally:
            for handle in handles:
                handle.remove()
        checks = []
        for call in calls:
            made = rebuild(call.where.experts, call.hidden, call.ids, call.weights)
            largest = weights = None
            if gate is not None and call.scores is not None:
                if not _grouped(call.where):
                    largest = _are_largest(gate.select(call.scores, call.moe_layer), call.ids)
                if gate.base != "none":
                    remade = gate.weigh(call.scores, call.ids, call.moe_layer)
                    weights = _error(remade, call.weights)
            checks.append(
                LayerCheck(
                    call.moe_layer,
                    _error(made, outputs[call.moe_layer].reshape(made.shape)),
                    _logits_error(call),
                    largest,
                    weights,
                )
            )
    return checks


def _keep(where: MoeLayer, outputs: dict[int, Tensor]) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        outputs[where.moe_layer] = output

    return where.experts.register_forward_hook(hook)


def _error(made: Tensor, wanted: Tensor) -> float:
    wanted = wanted.float()
    return float((made.float() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


def _are_largest(scores: Tensor, ids: Tensor) -> bool:
    """Tell whether no expert that was left out scores above one that was chosen."""
    worst = scores.gather(1, ids.long()).min(-1).values
    return bool(((scores > worst[:, None]).sum(-1) < ids.shape[1]).all())


def _grouped(where: MoeLayer) -> bool:
    """Tell whether the router first limits itself to some groups of experts."""
    groups = getattr(where.router, "num_group", None)
    chosen = getattr(where.router, "topk_group", None)
    return bool(groups and chosen and chosen < groups)


def _logits_error(call: ExpertsCall) -> float | None:
    """Compare the scores with a plain linear map of what the router read, where it is one."""
    weight = getattr(call.where.router, "weight", None)
    if call.scores is None or call.router_input is None or not isinstance(weight, Tensor):
        return None
    if weight.shape != (call.where.n_experts, call.router_input.shape[-1]):
        return None
    bias = getattr(call.where.router, "bias", None)
    wide = torch.promote_types(weight.dtype, call.router_input.dtype)
    made = functional.linear(
        call.router_input.to(wide), weight.to(wide), None if bias is None else bias.to(wide)
    )
    return _error(made, call.scores)
