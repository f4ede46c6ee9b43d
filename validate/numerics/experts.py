"""This module gives access to every expert's matrices in one layout, however a model stores them.

The matrices are views: what is written into them is what the model computes with. Fused and
interleaved gate and up projections are split, transposed ones turned.

Shapes: E experts, H hidden (or the latent width), I expert intermediate, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from moetier.traces.capture.find import MoeLayer
from moetier.traces.capture.rebuild import activated, halves
from moetier.traces.errors import InputError

MATRICES = ("gate", "up", "down")
BIASES = ("gate_bias", "up_bias", "down_bias")


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMatrices:
    """One expert, in the layout of `nn.Linear`: rows are outputs, columns inputs.

    An expert makes `down @ activation(gate @ x + gate_bias, up @ x + up_bias) + down_bias` of x,
    which *post_norm*, where there is one, then normalises. `stacked_matrices` puts a dimension E in
    front of every shape.
    """

    gate: Tensor | None  # (I, H); None: the expert has no gate
    up: Tensor  # (I, H)
    down: Tensor  # (H, I)
    gate_bias: Tensor | None  # (I)
    up_bias: Tensor | None  # (I)
    down_bias: Tensor | None  # (H)
    activation: Callable[[Tensor | None, Tensor], Tensor]  # two of (T, I) to (T, I)
    post_norm: nn.Module | None = None

    def matrices(self) -> dict[str, Tensor]:
        """Return gate (where there is one), up and down by name."""
        return {name: value for name in MATRICES if (value := getattr(self, name)) is not None}

    def biases(self) -> dict[str, Tensor]:
        """Return the biases there are, by name."""
        return {name: value for name in BIASES if (value := getattr(self, name)) is not None}

    def write(self, **values: Tensor) -> None:
        """Copy *values*, by the names of `matrices` and `biases`, into the model."""
        own = {**self.matrices(), **self.biases()}
        with torch.no_grad():
            for name, value in values.items():
                own[name].copy_(value)


def stacked_matrices(where: MoeLayer) -> ExpertMatrices:
    """Return the matrices of all experts of a layer, each with a dimension E in front.

    Raises:
        InputError: If the weights are not in memory.
    """
    module: Any = where.experts
    absent = [name for name, value in module.named_parameters() if value.is_meta]
    if absent:
        raise InputError(
            f"the weights of {', '.join(absent)} are not in memory",
            where=where.name,
            way_out="load the model without offloading",
        )
    gate = gate_bias = up_bias = down_bias = None
    if module.has_gate:
        gate, up = halves(module, _linear_layout(module, "gate_up_proj").mT)
        gate, up = gate.mT, up.mT
    else:
        up = _linear_layout(module, "up_proj")
    if module.has_bias:
        down_bias = module.down_proj_bias.detach()
        if module.has_gate:
            gate_bias, up_bias = halves(module, module.gate_up_proj_bias.detach())
        else:
            up_bias = module.up_proj_bias.detach()

    def activation(gated: Tensor | None, straight: Tensor) -> Tensor:
        return activated(module, gated, straight)

    norm = module.post_expert_norm if module.has_post_expert_norm else None
    down = _linear_layout(module, "down_proj")
    return ExpertMatrices(gate, up, down, gate_bias, up_bias, down_bias, activation, norm)


def expert_matrices(where: MoeLayer) -> list[ExpertMatrices]:
    """Return the matrices of each expert of a layer; raises as `stacked_matrices` does."""
    stack = stacked_matrices(where)

    def of(value: Tensor | None, expert: int) -> Tensor | None:
        return None if value is None else value[expert]

    return [
        replace(
            stack,
            gate=of(stack.gate, expert),
            up=stack.up[expert],
            down=stack.down[expert],
            gate_bias=of(stack.gate_bias, expert),
            up_bias=of(stack.up_bias, expert),
            down_bias=of(stack.down_bias, expert),
        )
        for expert in range(where.n_experts)
    ]


@contextmanager
def rewritten(
    layers: Sequence[MoeLayer],
    change: Callable[[MoeLayer, ExpertMatrices], Mapping[str, Tensor]],
) -> Iterator[None]:
    """Let a layer's experts have the tensors of *change* until the block ends; then as before.

    *change* gets each layer with its `stacked_matrices` and returns new stacks by their names; what
    it does not return stays. The originals are kept meanwhile, which takes their memory once more.
    """
    kept: list[tuple[ExpertMatrices, dict[str, Tensor]]] = []
    try:
        for where in layers:
            stack = stacked_matrices(where)
            new = change(where, stack)
            kept.append((stack, {name: getattr(stack, name).clone() for name in new}))
            stack.write(**new)
        yield
    finally:
        for stack, original in kept:
            stack.write(**original)


def require_finite(name: str, weights: Tensor) -> None:
    """Raise `InputError`, naming the tensor *name*, if one of *weights* is NaN or infinite."""
    bad = int((~torch.isfinite(weights)).sum())
    if bad:
        raise InputError(
            f"{bad} of {weights.numel()} weights are NaN or infinite",
            where=name,
            way_out="use a checkpoint that is whole",
        )


def _linear_layout(module: Any, name: str) -> Tensor:
    """Return a projection of all experts as (E, out, in)."""
    weight: Tensor = getattr(module, name).detach()
    return weight.mT if module.is_transposed else weight
