"""Check that activations are named as transformers computes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.activations import ACT2FN

from moetier.traces.capture.rebuild import activated
from moetier.traces.errors import InputError
from moetier.validate.numerics.channels.gating import Gating, gating_of

MODULES: list[dict[str, Any]] = [
    {"act_fn": ACT2FN["silu"]},
    {"act_fn": torch.nn.SiLU()},
    {"act_fn": ACT2FN["gelu"]},
    {"act_fn": ACT2FN["gelu_pytorch_tanh"]},
    {"act_fn": ACT2FN["silu"], "limit": 1.5},
    {"alpha": 1.702, "limit": 1.0},
]


@pytest.mark.parametrize("attributes", MODULES)
def test_a_module_s_activation_is_the_named_one(attributes: dict[str, Any]) -> None:
    module: Any = SimpleNamespace(**attributes)
    gate, up = torch.randn(4, 50) * 2, torch.randn(4, 50) * 2

    torch.testing.assert_close(gating_of(module)(gate, up), activated(module, gate, up))


def test_an_unknown_activation_is_refused() -> None:
    module: Any = SimpleNamespace(act_fn=torch.nn.ReLU())

    with pytest.raises(InputError, match=r"no activation 'ReLU'; it has silu"):
        gating_of(module)


def test_there_must_be_a_gate() -> None:
    with pytest.raises(InputError, match="without a gate"):
        Gating()(None, torch.ones(2))
