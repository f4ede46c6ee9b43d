"""Experts at another precision, for as long as a policy runs inside a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="a live model needs the extra 'models'")
pytest.importorskip("transformers", reason="a live model needs the extra 'models'")

from torch import nn  # noqa: E402

from moetier.sim.policy.base import Precision  # noqa: E402
from moetier.sim.policy.precision.full import Full  # noqa: E402
from moetier.sim.policy.precision.uniform import Uniform  # noqa: E402
from moetier.traces.errors import InputError  # noqa: E402
from moetier.validate.live_precision import check_precision, computed_at  # noqa: E402
from moetier.validate.numerics.groupwise import quantise  # noqa: E402


class Experts(nn.Module):
    """Four experts with matrices of 64 inputs, and a bias that stays as it is."""

    def __init__(self, transposed: bool = False) -> None:
        """Store matrices as (E, in, out) where *transposed*."""
        super().__init__()
        self.is_transposed = transposed
        generator = torch.Generator().manual_seed(0)
        matrix = torch.randn(4, 6, 64, generator=generator)
        self.down = nn.Parameter(matrix.mT.contiguous() if transposed else matrix)
        self.bias = nn.Parameter(torch.randn(4, 6, generator=generator))


def layers(experts: Experts) -> list[Any]:
    return [SimpleNamespace(experts=experts, n_experts=4, name="layer")]


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_are_rounded_along_their_input_and_come_back(transposed: bool) -> None:
    experts = Experts(transposed)
    before = {name: value.clone() for name, value in experts.named_parameters()}
    with computed_at(layers(experts), Uniform(bits=4, group=32)):
        inside = {name: value.clone() for name, value in experts.named_parameters()}

    matrix = before["down"].mT if transposed else before["down"]
    expected = quantise(matrix.detach(), 4, half_scales=True).weights()
    torch.testing.assert_close(inside["down"].mT if transposed else inside["down"], expected)
    assert torch.equal(inside["bias"], before["bias"])
    assert all(torch.equal(value, before[name]) for name, value in experts.named_parameters())


def test_full_precision_touches_nothing() -> None:
    experts = Experts()
    version = experts.down._version
    with computed_at(layers(experts), Full()):
        pass

    assert experts.down._version == version


def test_weights_are_back_after_an_error() -> None:
    experts = Experts()
    before = experts.down.clone()
    with (
        pytest.raises(RuntimeError, match="stop"),
        computed_at(layers(experts), Uniform(bits=2)),
    ):
        raise RuntimeError("stop")

    assert torch.equal(experts.down, before)


def test_groups_that_do_not_fit_are_named() -> None:
    experts = Experts()
    before = experts.down.clone()
    with (
        pytest.raises(InputError, match=r"policy\.precision\.group: an input dimension of 64"),
        computed_at(layers(experts), Uniform(bits=4, group=48)),
    ):
        pass

    assert torch.equal(experts.down, before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_numbers_have_no_codes(value: float) -> None:
    experts = Experts()
    with torch.no_grad():
        experts.down[1, 0, 0] = value
    before = experts.down.clone()
    with (
        pytest.raises(InputError, match=r"1 of .* weights are NaN or infinite"),
        computed_at(layers(experts), Uniform(bits=4)),
    ):
        pass

    assert torch.equal(experts.down.nan_to_num(), before.nan_to_num())


def test_what_cannot_be_computed_is_refused() -> None:
    class Sliced(Precision):
        """A precision nobody computes."""

        alters_output = True

    check_precision(Full())
    check_precision(Uniform(bits=8))
    with pytest.raises(InputError, match="use 1 to 8 bits, or `full`"):
        check_precision(Uniform(bits=9))
    with pytest.raises(InputError, match="precision 'Sliced' cannot be computed inside a model"):
        check_precision(Sliced())
