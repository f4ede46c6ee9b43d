"""This module watches a model's experts, and may replace what they are asked to do.

Every experts module gets a forward pre-hook: it sees exactly what `experts.forward` is about to
receive, changes nothing by itself, and leaves the choice of implementation to the model. Neither
the configuration nor any global table is touched, so removing the hooks restores the model.

Shapes: T tokens of the forward pass (padding included), K experts per token, E experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from moetier.traces.capture.find import MoeLayer, find_moe_layers
from moetier.traces.errors import InputError

Override = tuple[Tensor, Tensor]
"""Expert ids (T, K') and gate weights (T, K') to use instead; K' may differ from K."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsCall:
    """What one MoE layer of one forward pass is about to compute.

    The tensors are those of the model, on its devices: copy what you keep, change nothing in place.
    """

    forward: int  # forward pass since `attach`, from 0
    where: MoeLayer
    hidden: Tensor  # (T, H) what the experts read; H is the latent width where there is one
    ids: Tensor  # (T, K)
    weights: Tensor  # (T, K)
    scores: Tensor | None  # (T, E) as the router returns them: see `gate` for their meaning
    router_input: Tensor | None  # (T, H) what the router read; its own norm is not yet applied

    @property
    def layer(self) -> int:
        """Return the model-layer index."""
        return self.where.layer

    @property
    def moe_layer(self) -> int:
        """Return the index among the MoE layers."""
        return self.where.moe_layer


Observer = Callable[[ExpertsCall], Override | None]
"""Called before each MoE layer computes; returns what to compute with instead, or None."""

ForwardObserver = Callable[[int, tuple[Any, ...], dict[str, Any]], None]
"""Called before each forward pass of the whole model with its number, args and kwargs."""


@contextmanager
def attach(
    model: nn.Module, observer: Observer, on_forward: ForwardObserver | None = None
) -> Iterator[list[MoeLayer]]:
    """Call *observer* before every MoE layer of *model* computes, until the block ends.

    Call the model itself, not a part of it: a forward pass is what happens between its start and
    its end. On exit, also after an exception, no hook is left.

    Raises:
        InputError: The family cannot be seen, at once or after the first forward pass, in which
            every MoE layer has to be called exactly once.
    """
    layers = find_moe_layers(model)
    state = _State(model, observer, on_forward, [0] * len(layers))
    handles = [
        model.register_forward_pre_hook(state.begin, with_kwargs=True),
        model.register_forward_hook(state.end),
    ]
    try:
        for where in layers:
            if where.router is not None:
                handles.append(
                    where.router.register_forward_hook(state.router_hook(where), with_kwargs=True)
                )
            handles.append(
                where.experts.register_forward_pre_hook(state.experts_hook(where), with_kwargs=True)
            )
        yield layers
    finally:
        for handle in handles:
            handle.remove()


class _State:
    def __init__(
        self,
        model: nn.Module,
        observer: Observer,
        on_forward: ForwardObserver | None,
        calls: list[int],
    ) -> None:
        self.family, self.observer, self.on_forward = type(model).__name__, observer, on_forward
        self.calls = calls  # of each MoE layer, in this forward pass
        self.forward = -1
        self.routed: dict[int, tuple[Tensor | None, Tensor | None]] = {}

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.forward += 1
        self.calls[:] = [0] * len(self.calls)
        if self.on_forward is not None:
            self.on_forward(self.forward, args, kwargs)

    def end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if any(count != 1 for count in self.calls):
            counts = ", ".join(str(count) for count in self.calls)
            raise InputError(
                f"the routing of {self.family} cannot be captured: one forward pass called the "
                f"experts of its {len(self.calls)} MoE layers {counts} times, expected once each "
                "(compiled code and replaced kernels bypass the experts interface)",
                way_out="load the model without kernels and compilation, in a plain format",
            )

    def router_hook(self, where: MoeLayer) -> Any:
        def hook(
            router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> None:
            first = next(iter(args or kwargs.values()), None)
            self.routed[where.moe_layer] = (_scores(output, where.n_experts), _flat(first))

        return hook

    def experts_hook(self, where: MoeLayer) -> Any:
        def hook(
            experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            hidden, ids, weights = arguments(args, kwargs)
            self.calls[where.moe_layer] += 1
            scores, router_input = self.routed.pop(where.moe_layer, (None, None))
            call = ExpertsCall(
                max(self.forward, 0), where, hidden, ids, weights, scores, router_input
            )
            override = self.observer(call)
            if override is None:
                return None
            new_ids, new_weights = override
            _check("ids", new_ids, len(ids))
            _check("weights", new_weights, len(ids))
            if new_ids.shape != new_weights.shape:
                k, n = new_ids.shape[1], new_weights.shape[1]
                raise ValueError(f"the observer returned {k} ids and {n} weights a token")
            new_ids = new_ids.to(ids.device, ids.dtype)
            return (hidden, new_ids, new_weights.to(weights.device, weights.dtype)), {}

        return hook


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden, ids and weights, however the family passes and names them."""
    missing = (
        ("hidden_states",),
        ("top_k_index", "router_indices"),
        ("top_k_weights", "routing_weights"),
    )[len(args) :]
    named = (next(kwargs[name] for name in names if name in kwargs) for names in missing)
    hidden, ids, weights = (*args, *named)
    return hidden, ids, weights


def _scores(output: Any, n_experts: int) -> Tensor | None:
    """Return the first output of a router as (T, E), or None if it scores anything else."""
    first = output[0] if isinstance(output, tuple) else output
    if not isinstance(first, Tensor) or first.shape[-1] != n_experts:
        return None
    return first.detach().reshape(-1, n_experts)


def _flat(value: Any) -> Tensor | None:
    if not isinstance(value, Tensor):
        return None
    return value.detach().reshape(-1, value.shape[-1])


def _check(what: str, value: Tensor, n_tokens: int) -> None:
    if value.dim() != 2 or len(value) != n_tokens:
        raise ValueError(
            f"the observer returned {what} of shape {tuple(value.shape)} for {n_tokens} tokens"
        )
