"""This module measures default vectors: what each expert puts out on average."""

from __future__ import annotations

import torch
from torch import Tensor

from moetier.traces.capture.rebuild import expert_output
from moetier.traces.errors import InputError
from moetier.traces.predictors.learn.parts import ModelParts
from moetier.traces.predictors.learn.samples import Samples

AT_ONCE = 4096
"""Tokens that go through an expert together."""

OTHERS = 256
"""Tokens that stand in for an expert which was given none."""


@torch.no_grad()
def default_vectors(samples: Samples, parts: ModelParts) -> Tensor:
    """Return the mean output of every expert, (L - 1, E, H), over the tokens routed to it.

    An expert that no token was routed to gets its mean over some tokens of its layer. Raises
    `InputError` for a family whose experts read or write something else than the stream.
    """
    if not parts.experts_read_the_same:
        raise InputError(
            f"the experts of {parts.family} do not read what its routers read, so their outputs "
            "cannot be had from a capture",
            way_out="use router-reuse, low-rank, mlp or linear",
        )
    layers = []
    for layer in range(parts.n_layers - 1):
        found, experts = samples.layers[layer], parts.layers[layer].where.experts
        device = next(experts.parameters()).device
        rows = []
        for expert in range(parts.seen.n_experts):
            mine = found.router_input[torch.any(found.ids == expert, 1)]
            inputs = mine if len(mine) else found.router_input[:OTHERS]
            total = torch.zeros(inputs.shape[1], dtype=torch.float64)
            for start in range(0, len(inputs), AT_ONCE):
                part = inputs[start : start + AT_ONCE].to(device)
                total += expert_output(experts, expert, part).double().sum(0).cpu()
            rows.append(total.float() / len(inputs))
        layers.append(torch.stack(rows))
    return torch.stack(layers)
