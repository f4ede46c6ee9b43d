"""This module finds a model's norms and routers, so that predictors can ask them early.

The norm that feeds a router is found by what happens in a forward pass: it is the module of the
decoder layer whose output is the router's input, and its own input is the residual. Both parts are
then run again on what they were given, and used only if they return what they returned.

Shapes: T tokens, V valid ones, H hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from moetier.traces.capture.describe import describe
from moetier.traces.capture.find import MoeLayer
from moetier.traces.capture.hook import ExpertsCall, attach
from moetier.traces.capture.probe import PROBE_TOKENS, Probe, probe
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.traces.schema import ScoreKind

CLOSE = 1e-3
"""Largest error, relative to the largest value, at which a part counts as found (float32)."""

CLOSE_LOW = 3e-2
"""The same where the model computes in 16 bits."""

Raw = Callable[[Tensor], Tensor]
_RAW: dict[str, Raw] = {
    "logits": lambda logits: logits,
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": lambda logits: logits.sigmoid(),
}
"""What a router may return of its logits."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """The norm and router of one MoE layer."""

    where: MoeLayer
    norm: nn.Module
    weight: str  # name of the (E, H) parameter in the router
    bias: str | None  # name of the (E,) parameter that is added to the logits
    wide: bool  # does the router compute in float32, whatever it reads?

    def logits(self, x: Tensor) -> Tensor:
        """Return the float32 logits (V, E) of the router for what it reads (V, H)."""
        router: Any = self.where.router
        weight = router.get_parameter(self.weight)
        bias = None if self.bias is None else router.get_parameter(self.bias)
        dtype = torch.float32 if self.wide else torch.promote_types(weight.dtype, x.dtype)
        made = functional.linear(
            x.to(weight.device, dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        )
        return made.float()


class ModelParts:
    """The norms and routers of *model*; made by `find_parts`."""

    def __init__(
        self,
        model: Any,
        seen: Probe,
        layers: list[LayerParts],
        raw: str,
        *,
        experts_read_the_same: bool,
    ) -> None:
        """Hold what was found; do the experts read what their router reads?"""
        self.experts_read_the_same = experts_read_the_same
        assert seen.gate is not None
        self.model, self.seen, self.layers, self.gate = model, seen, layers, seen.gate
        self.raw = raw  # what the routers return: a key of `_RAW`
        self.geometry: Geometry = describe(model, seen)

    @property
    def family(self) -> str:
        """The name of the model's class."""
        return type(self.model).__name__

    @property
    def n_layers(self) -> int:
        """The number of MoE layers."""
        return len(self.layers)

    @property
    def score_kind(self) -> ScoreKind:
        """What `scores` returns."""
        return self.gate.score_kind

    def norm(self, layer: int, residual: Tensor) -> Tensor:
        """Return what the norm before the router of *layer* makes of *residual* (V, H).

        It is called past its hooks, as nobody but the model is to be seen there.
        """
        stream = residual.to(self.device(layer))[None]  # as in the model: (B, S, H)
        made: Tensor = self.layers[layer].norm.forward(stream)
        return made[0]

    def device(self, layer: int) -> torch.device:
        """Return where the router of *layer* is."""
        router: Any = self.layers[layer].where.router
        device: torch.device = router.get_parameter(self.layers[layer].weight).device
        return device

    def logits(self, layer: int, router_input: Tensor) -> Tensor:
        """Return the float32 logits (V, E) of the router of *layer* for *router_input* (V, H)."""
        return self.layers[layer].logits(router_input)

    def scores(self, layer: int, logits: Tensor) -> Tensor:
        """Return *logits* as a trace holds the scores of that router: see `score_kind`."""
        return self.gate.select(_RAW[self.raw](logits.float()), layer)

    @contextmanager
    def residuals(self) -> Iterator[dict[int, Tensor]]:
        """Keep the latest residual (T, H) of every MoE layer, until the block ends."""
        kept: dict[int, Tensor] = {}

        def keep(layer: int) -> Any:
            def hook(norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                residual: Tensor = next(iter(args or kwargs.values())).detach()
                kept[layer] = residual.reshape(-1, residual.shape[-1])

            return hook

        handles = [
            parts.norm.register_forward_pre_hook(keep(layer), with_kwargs=True)
            for layer, parts in enumerate(self.layers)
        ]
        try:
            yield kept
        finally:
            for handle in handles:
                handle.remove()


@torch.no_grad()
def find_parts(model: Any, seen: Probe | None = None) -> ModelParts:
    """Return the norms and routers of *model*, which `probe` may have *seen*.

    Raises `InputError`, naming the family, where they are not found or do not compute again what
    they computed.
    """
    seen = seen or probe(model)
    family = type(model).__name__
    calls: list[ExpertsCall] = []
    ran: dict[int, list[tuple[nn.Module, Tensor, Tensor]]] = {}
    embeddings = model.get_input_embeddings()
    tokens = (torch.arange(PROBE_TOKENS) * 104729 + 7) % int(embeddings.num_embeddings)
    handles = [
        module.register_forward_hook(_watch(ran.setdefault(where.moe_layer, [])), with_kwargs=True)
        for where in seen.layers
        for module in where.decoder.modules()
        if module is not where.router
    ]
    try:
        with attach(model, calls.append):
            model(input_ids=tokens[None].to(embeddings.weight.device), use_cache=False)
        if seen.gate is None or any(call.router_input is None for call in calls):
            raise _refusal(family, "its router's input or scores are not to be had")
        layers = [_layer(family, call, ran[call.moe_layer]) for call in calls]
        raw = _raw(family, layers, calls)
    finally:
        for handle in handles:
            handle.remove()
    same = all(torch.equal(call.hidden, _known(call.router_input)) for call in calls)
    return ModelParts(model, seen, layers, raw, experts_read_the_same=same)


def _watch(ran: list[tuple[nn.Module, Tensor, Tensor]]) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        first = next(iter(args or kwargs.values()), None)
        if isinstance(first, Tensor) and isinstance(out, Tensor) and first.shape == out.shape:
            flat = out.shape[-1]
            ran.append((module, first.detach().reshape(-1, flat), out.detach().reshape(-1, flat)))

    return hook


def _layer(
    family: str, call: ExpertsCall, ran: list[tuple[nn.Module, Tensor, Tensor]]
) -> LayerParts:
    read = call.router_input
    assert read is not None
    for norm, residual, out in ran:
        same = out.shape == read.shape and torch.equal(out, read)
        if not same or torch.equal(residual, read):
            continue
        if _error(norm.forward(residual[None])[0], out) < _close(out):
            return _router(family, call, norm)
    raise _refusal(
        family,
        f"no norm's output is what the router of MoE layer {call.moe_layer} reads, "
        "so its residual is not found",
    )


def _router(family: str, call: ExpertsCall, norm: nn.Module) -> LayerParts:
    """Return the layer's parts, with the arithmetic that explains its scores best."""
    router, read, scores = call.where.router, call.router_input, call.scores
    assert router is not None
    assert read is not None
    assert scores is not None
    named = dict(router.named_parameters())
    shape = (call.where.n_experts, read.shape[-1])
    weights = [name for name, value in named.items() if tuple(value.shape) == shape]
    biases = [name for name, value in named.items() if tuple(value.shape) == shape[:1]]
    tried = [
        LayerParts(call.where, norm, weight, bias, wide)
        for weight in weights
        for bias in (None, *biases)
        for wide in (False, True)
    ]
    if not tried:
        raise _refusal(family, "its router has no weight of one row per expert")
    return min(
        tried,
        key=lambda parts: min(_error(raw(parts.logits(read)), scores) for raw in _RAW.values()),
    )


def _raw(family: str, layers: list[LayerParts], calls: list[ExpertsCall]) -> str:
    """Return what the routers make of their logits, the same in all layers."""
    errors: dict[str, float] = {}
    for name, raw in _RAW.items():
        errors[name] = max(
            _error(raw(parts.logits(_known(call.router_input))), _known(call.scores))
            for parts, call in zip(layers, calls, strict=True)
        )
    best = min(errors, key=lambda name: errors[name])
    if errors[best] > _close(_known(calls[0].router_input)):
        raise _refusal(
            family,
            "its router's scores are no plain map of what it reads "
            f"(off by {errors[best]:.1%}): it may have a norm of its own",
        )
    return best


def _known(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


def _error(made: Tensor, wanted: Tensor) -> float:
    wanted = wanted.float()
    return float((made.float() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


def _close(value: Tensor) -> float:
    return CLOSE if value.dtype == torch.float32 else CLOSE_LOW


def _refusal(family: str, problem: str) -> InputError:
    return InputError(
        f"no predictor works inside {family}: {problem}",
        way_out="use previous-token or popularity, which need no part of a model",
    )
