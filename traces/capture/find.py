"""This module finds the MoE layers of a model, and refuses by name what cannot be seen."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn

from moetier.traces.errors import InputError

ROUTER_NAMES = ("router", "gate")
REASONS = {
    "Llama4": "its experts take tokens already sorted and weighted, without expert ids",
    "JetMoe": "its router sorts the tokens itself, and its attention is routed too",
    "Dbrx": "its experts do not go through the experts interface",
    "LongcatFlash": "its experts do not go through the experts interface",
    "NllbMoe": "its experts do not go through the experts interface",
    "SwitchTransformers": "its experts do not go through the experts interface",
    "Mxfp4": "its packed experts do not go through the experts interface",
}
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_EXPERT_CLASS = re.compile(r"Experts?(?!.*(Norm|Router|Gate))")


@dataclass(frozen=True, slots=True, eq=False)
class MoeLayer:
    """Where one MoE layer lives in a model."""

    layer: int  # model-layer index
    moe_layer: int  # index among the MoE layers
    name: str  # module path of the experts
    experts: nn.Module  # what takes (hidden, ids, weights)
    block: nn.Module  # the module that holds the experts and the router
    router: nn.Module | None
    decoder: nn.Module  # the whole decoder layer

    @property
    def n_experts(self) -> int:
        """Return the number of routed experts."""
        return int(self.experts.num_experts)  # type: ignore[arg-type]  # a plain attribute


def find_moe_layers(model: nn.Module) -> list[MoeLayer]:
    """Return the MoE layers of *model* in model-layer order.

    Raises `InputError` when the model has none, when some of its experts do not go through the
    experts interface of transformers, and when it has two stacks of MoE layers.
    """
    modules = dict(model.named_modules())
    names = [name for name, module in modules.items() if is_experts(module)]
    _refuse_unseen(model, modules, names)
    layers, stacks = [], {}
    for name in names:
        match = _LAYER.search(name)
        if match is None:
            raise InputError(f"the experts at '{name}' are in no numbered layer")
        stacks[name[: match.start()]] = name
        if getattr(modules[name], "_is_expert_parallel", False):
            raise InputError(
                "expert parallelism hides the ids of remote experts",
                where=name,
                way_out="load the model without it",
            )
        block = modules[name.rpartition(".")[0]]
        layers.append((int(match[1]), name, block, modules[name[: match.end()].rstrip(".")]))
    if len(stacks) > 1:
        raise InputError(
            f"{_family(model)} has {len(stacks)} stacks of MoE layers: {', '.join(stacks)}",
            way_out="capture one of them on its own",
        )
    layers.sort(key=lambda item: item[0])
    if len({item[0] for item in layers}) < len(layers):
        raise InputError(f"{_family(model)} has two experts modules in one layer")
    return [
        MoeLayer(layer, index, name, modules[name], block, _router(block), decoder)
        for index, (layer, name, block, decoder) in enumerate(layers)
    ]


def dense_layers(model: nn.Module, layers: list[MoeLayer]) -> list[nn.Module]:
    """Return the decoder layers of *model* without routed experts, in order."""
    stack = layers[0].name[: layers[0].name.index(f".{layers[0].layer}.")]
    routed = {where.layer for where in layers}
    children = enumerate(model.get_submodule(stack).children())
    return [decoder for index, decoder in children if index not in routed]


def is_experts(module: nn.Module) -> bool:
    """Tell whether *module* is dispatched by the experts interface of transformers."""
    return hasattr(module, "_is_expert_parallel") and hasattr(module, "is_transposed")


def _router(block: nn.Module) -> nn.Module | None:
    children = dict(block.named_children())
    return next((children[name] for name in ROUTER_NAMES if name in children), None)


def _refuse_unseen(model: nn.Module, modules: dict[str, nn.Module], seen: list[str]) -> None:
    inside = tuple(f"{name}." for name in seen)
    unseen = sorted(
        {
            type(module).__name__
            for name, module in modules.items()
            if _EXPERT_CLASS.search(type(module).__name__)
            and name not in seen
            and not name.startswith(inside)
            and "shared" not in name
            and name
        }
    )
    family = _family(model)
    if unseen:
        classes = ", ".join(unseen)
        known = (reason for key, reason in REASONS.items() if classes.startswith(key))
        reason = next(known, "they do not go through the experts interface of transformers")
        raise InputError(
            f"the routing of {family} cannot be captured: {classes}: {reason}",
            way_out="record it with the serving engine and convert that trace",
        )
    if not seen:
        raise InputError(
            f"{family} has no routed experts that transformers dispatches",
            way_out="use a Mixture-of-Experts checkpoint",
        )


def _family(model: nn.Module) -> str:
    return type(model).__name__
