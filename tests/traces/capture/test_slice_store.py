"""Check that a model of any family can be sliced, stored and computed from its slices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moetier.traces.errors import InputError
from moetier.traces.formats import bit_slice_bytes

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors import safe_open  # noqa: E402  # needs torch

from moetier.traces.capture.describe import describe  # noqa: E402
from moetier.traces.capture.find import find_moe_layers  # noqa: E402
from moetier.traces.capture.probe import probe  # noqa: E402
from moetier.validate.numerics.experts import stacked_matrices  # noqa: E402
from moetier.validate.numerics.slice_store import build_slices, open_slices  # noqa: E402
from moetier.validate.numerics.variants import high_bits, nested  # noqa: E402

Build = Callable[..., Any]
GROUP = 8


def sliced(model: Any, folder: Path, high: int = 6, low: int = 3) -> Path:
    path = folder / "model.slices"
    build_slices(model, path, high, low, GROUP)
    return path


def states(model: Any) -> dict[str, Any]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("lsb", "variant"), [(True, high_bits), (False, nested)])
def test_a_model_computes_with_what_its_slices_hold(
    family: str, build: Build, tmp_path: Path, lsb: bool, variant: Any
) -> None:
    model = build(family)
    layers = find_moe_layers(model)
    before = states(model)
    expected = [
        {name: variant(w, 6, 3, GROUP) for name, w in stacked_matrices(where).matrices().items()}
        for where in layers
    ]
    with (
        open_slices(sliced(model, tmp_path), model) as store,
        store.computed(layers, lsb=lsb),
    ):
        for where, matrices in zip(layers, expected, strict=True):
            stack = stacked_matrices(where)
            for name, value in matrices.items():
                assert torch.equal(getattr(stack, name), value)
        inside = states(model)
    changed = {name for name, value in before.items() if not torch.equal(value, inside[name])}

    assert changed
    assert all(".experts." in name for name in changed)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_stored_bytes_are_the_bytes_charged(family: str, build: Build, tmp_path: Path) -> None:
    model = build(family)
    geometry = describe(model, probe(model))
    latent = stacked_matrices(find_moe_layers(model)[0]).up.shape[-1]
    geometry = geometry.model_copy(update={"hidden": latent})  # NemotronH's experts are narrower
    msb, lsb = bit_slice_bytes(geometry, 6, 3, GROUP)
    path = sliced(model, tmp_path)
    with safe_open(path, framework="pt") as file:
        names = file.keys()
        sizes = {name: file.get_slice(name).get_shape() for name in names}

    assert sizes == {
        f"{layer}.{expert}.{part}": [nbytes]
        for layer in range(geometry.n_moe_layers)
        for expert in range(geometry.n_experts)
        for part, nbytes in (("msb", msb), ("lsb", lsb))
    }


def test_biases_are_kept_in_16_bits(build: Build, tmp_path: Path) -> None:
    model = build("GptOss")
    layers = find_moe_layers(model)
    stack = stacked_matrices(layers[0])
    for bias in stack.biases().values():
        bias.normal_(generator=torch.Generator().manual_seed(0))
    before = {name: bias.clone() for name, bias in stack.biases().items()}
    with (
        open_slices(sliced(model, tmp_path), model) as store,
        store.computed(layers, lsb=False),
    ):
        for name, bias in before.items():
            assert torch.equal(getattr(stack, name), bias.bfloat16().float())

    assert torch.equal(stack.biases()["up_bias"], before["up_bias"])


def test_progress_counts_experts(build: Build, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    build_slices(
        build("Olmoe"), tmp_path / "x", 8, 4, GROUP, lambda done, total: seen.append((done, total))
    )

    assert seen == [(done, 16) for done in range(1, 17)]


def test_another_models_slices_are_refused(build: Build, tmp_path: Path) -> None:
    path = sliced(build("Olmoe"), tmp_path)
    with (
        pytest.raises(InputError, match=r"was made from olmoe .*not from this model"),
        open_slices(path, build("Olmoe", seed=1)),
    ):
        pass


def test_a_flipped_byte_is_refused_where_it_is_read(build: Build, tmp_path: Path) -> None:
    model = build("Olmoe")
    path = sliced(model, tmp_path)
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x10  # the last tensor by name
    path.write_bytes(data)
    with open_slices(path, model) as store:
        store.expert(0, 0, lsb=True)
        with pytest.raises(InputError, match=r"tensor '1\.7\.msb' is damaged"):
            store.expert(1, 7, lsb=False)


def test_an_expert_that_is_not_there_is_refused(build: Build, tmp_path: Path) -> None:
    model = build("Olmoe")
    with (
        open_slices(sliced(model, tmp_path), model) as store,
        pytest.raises(InputError, match=r"has no tensor '0\.8\.msb'"),
    ):
        store.expert(0, 8, lsb=False)


def test_a_bad_weight_is_named_and_nothing_is_written(build: Build, tmp_path: Path) -> None:
    model = build("GptOss")
    stacked_matrices(find_moe_layers(model)[1]).up[3, 2, 1] = float("nan")
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.experts\.3\.up: 1 of 512 weights"):
        sliced(model, tmp_path)

    assert not list(tmp_path.iterdir())


def test_layers_of_several_shapes_are_refused(build: Build, tmp_path: Path) -> None:
    model = build("Olmoe")
    experts = find_moe_layers(model)[1].experts
    experts.down_proj = torch.nn.Parameter(torch.zeros(8, 32, 8))
    experts.gate_up_proj = torch.nn.Parameter(torch.zeros(8, 16, 32))
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.experts: its experts have another"):
        sliced(model, tmp_path)


@pytest.mark.parametrize(
    ("high", "low", "group", "problem"),
    [(4, 4, 8, "4/4 bits are out of range"), (4, 2, 5, "whole number of groups of 5")],
)
def test_what_makes_no_slices_is_refused(
    high: int, low: int, group: int, problem: str, build: Build, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=problem):
        build_slices(build("Olmoe"), tmp_path / "x", high, low, group)


def test_the_same_model_makes_the_same_bytes(build: Build, tmp_path: Path) -> None:
    first = sliced(build("Qwen3Moe"), tmp_path).read_bytes()

    assert sliced(build("Qwen3Moe"), tmp_path).read_bytes() == first
