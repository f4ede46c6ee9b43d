"""Check that every family's experts can be read and written in one layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moetier.traces.errors import InputError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import Tensor  # noqa: E402  # needs torch

from moetier.traces.capture.find import MoeLayer, find_moe_layers  # noqa: E402
from moetier.traces.capture.rebuild import expert_output  # noqa: E402
from moetier.validate.numerics.experts import (  # noqa: E402
    ExpertMatrices,
    expert_matrices,
    require_finite,
    rewritten,
    stacked_matrices,
)

Build = Callable[..., Any]


def fill_biases(layers: list[MoeLayer]) -> None:
    for where in layers:
        for name, value in where.experts.named_parameters():
            if name.endswith("_bias"):
                value.data.normal_(generator=torch.Generator().manual_seed(1))


def computed(expert: ExpertMatrices, x: Tensor) -> Tensor:
    """Return what the formula in the docstring makes of x, (T, H)."""

    def product(weight: Tensor, bias: Tensor | None, value: Tensor) -> Tensor:
        out = value @ weight.T
        return out if bias is None else out + bias

    gate = None if expert.gate is None else product(expert.gate, expert.gate_bias, x)
    act = expert.activation(gate, product(expert.up, expert.up_bias, x))
    out = product(expert.down, expert.down_bias, act)
    return out if expert.post_norm is None else expert.post_norm(out)


def test_the_matrices_compute_what_the_model_computes(family: str, build: Build) -> None:
    layers = find_moe_layers(build(family))
    fill_biases(layers)
    with torch.no_grad():
        for where in layers:
            experts = expert_matrices(where)
            assert len(experts) == where.n_experts
            for number, expert in enumerate(experts):
                hidden = expert.up.shape[1]
                x = torch.randn(5, hidden, generator=torch.Generator().manual_seed(number))
                expected = expert_output(where.experts, number, x)

                torch.testing.assert_close(computed(expert, x), expected, rtol=1e-5, atol=1e-6)
                assert expert.down.shape == expert.up.shape[::-1]
                assert expert.gate is None or expert.gate.shape == expert.up.shape


def test_what_is_written_is_what_the_model_computes_with(family: str, build: Build) -> None:
    where = find_moe_layers(build(family))[0]
    fill_biases([where])
    twin = expert_matrices(find_moe_layers(build(family, seed=1))[0])[3]
    expert, other = expert_matrices(where)[3], expert_matrices(where)[4]
    before = other.up.clone()
    expert.write(**twin.matrices(), **{name: b + 1 for name, b in expert.biases().items()})
    x = torch.randn(5, expert.up.shape[1], generator=torch.Generator().manual_seed(0))

    for name, value in twin.matrices().items():
        assert torch.equal(expert_matrices(where)[3].matrices()[name], value)
    assert torch.equal(other.up, before)
    with torch.no_grad():
        torch.testing.assert_close(expert_output(where.experts, 3, x), computed(expert, x))


def test_gpt_oss_is_turned_and_its_rows_parted(build: Build) -> None:
    where = find_moe_layers(build("GptOss"))[0]
    experts: Any = where.experts
    expert = expert_matrices(where)[2]
    assert expert.gate is not None
    assert expert.up_bias is not None

    assert torch.equal(expert.gate[5], experts.gate_up_proj[2, :, 10])
    assert torch.equal(expert.up[5], experts.gate_up_proj[2, :, 11])
    assert torch.equal(expert.down[7], experts.down_proj[2, :, 7])
    assert sorted(expert.biases()) == ["down_bias", "gate_bias", "up_bias"]
    assert expert.up_bias[5] == experts.gate_up_proj_bias[2, 11]


def test_experts_without_a_gate_have_two_matrices(build: Build) -> None:
    expert = expert_matrices(find_moe_layers(build("NemotronH"))[0])[0]

    assert list(expert.matrices()) == ["up", "down"]
    assert not expert.biases()


def test_the_stack_is_the_experts_one_on_another(family: str, build: Build) -> None:
    where = find_moe_layers(build(family))[0]
    stack, experts = stacked_matrices(where), expert_matrices(where)
    for name, value in {**stack.matrices(), **stack.biases()}.items():
        assert torch.equal(value, torch.stack([getattr(expert, name) for expert in experts]))


def test_rewriting_changes_every_expert_matrix_and_is_undone(family: str, build: Build) -> None:
    model = build(family)
    layers = find_moe_layers(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def double(where: MoeLayer, stack: ExpertMatrices) -> dict[str, Tensor]:
        return {name: 2 * matrix for name, matrix in stack.matrices().items()}

    with rewritten(layers, double):
        inside = {name: value.clone() for name, value in model.state_dict().items()}
    changed = {name for name in before if not torch.equal(before[name], inside[name])}
    weights = {
        f"{where.name}.{name}"
        for where in layers
        for name, value in where.experts.named_parameters()
        if value.dim() == 3
    }

    assert changed == weights
    assert all(torch.equal(inside[name], 2 * before[name]) for name in changed)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_rewriting_is_undone_after_an_error(build: Build) -> None:
    model = build("GptOss")
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def fail_late(where: MoeLayer, stack: ExpertMatrices) -> dict[str, Tensor]:
        if where.layer == 1:
            raise InputError("no")
        return {"up": 2 * stack.up, "down_bias": torch.ones(8, 32)}

    with pytest.raises(InputError, match="no"), rewritten(find_moe_layers(model), fail_late):
        pass

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_weights_that_are_elsewhere_are_refused(build: Build) -> None:
    where = find_moe_layers(build("Qwen3Moe").to("meta"))[0]
    with pytest.raises(InputError, match=r"weights of gate_up_proj, down_proj are not in memory"):
        stacked_matrices(where)


def test_weights_that_are_no_numbers_are_refused() -> None:
    require_finite("a", torch.ones(3))
    for value in (float("nan"), float("-inf")):
        with pytest.raises(InputError, match=r"layer\.up: 1 of 4 weights are NaN or infinite"):
            require_finite("layer.up", torch.tensor([0.0, 1.0, value, 2.0]))
