"""This module names what experts make of the products with gate and up, for torch and the kernel.

| kind | of gate g and up u |
|------|--------------------|
| silu | g sigmoid(g) u (SwiGLU) |
| gelu, gelu-tanh | GELU(g) u, exact or by its tanh approximation |
| swish-plus-one | g sigmoid(alpha g) (u + 1) (gpt-oss) |

With a *limit*, g is cut at the limit from above, and u on both sides, before anything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from moetier.traces.errors import InputError

Kind = Literal["silu", "gelu", "gelu-tanh", "swish-plus-one"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_ACT_FN: dict[str, Kind] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu-tanh",
}


@dataclass(frozen=True, slots=True)
class Gating:
    """A gated activation; calling it with gate and up computes it in torch."""

    kind: Kind = "silu"
    alpha: float = 1.0  # of swish-plus-one
    limit: float | None = None

    def __call__(self, gate: Tensor | None, up: Tensor) -> Tensor:
        """Return the activations, of the shape of *gate* and *up*."""
        if gate is None:
            raise InputError("experts without a gate have no gated activation")
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        match self.kind:
            case "silu":
                return functional.silu(gate) * up
            case "gelu":
                return functional.gelu(gate) * up
            case "gelu-tanh":
                return functional.gelu(gate, approximate="tanh") * up
            case "swish-plus-one":
                return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


def gating_of(experts: nn.Module) -> Gating:
    """Return what an experts module of transformers computes between its products.

    Raises:
        InputError: If its activation is none of the kinds.
    """
    module: Any = experts
    limit, alpha = getattr(module, "limit", None), getattr(module, "alpha", None)
    if alpha is not None:
        return Gating("swish-plus-one", float(alpha), limit)
    name = type(getattr(module, "act_fn", None)).__name__
    if name not in _ACT_FN:
        raise InputError(
            f"the kernel has no activation '{name}'", way_out=f"it has {', '.join(KINDS)}"
        )
    return Gating(_ACT_FN[name], limit=limit)
