"""Check that slices are what they are charged as, and hold an expert exactly."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moetier.traces.errors import InputError
from moetier.traces.formats import bit_slice_bytes
from moetier.traces.geometry import Geometry, load_geometry
from moetier.validate.numerics.experts import ExpertMatrices
from moetier.validate.numerics.groupwise import Quantised
from moetier.validate.numerics.slices import (
    SlicedExpert,
    SliceFormat,
    pack,
    pack_bits,
    sliced,
    unpack,
    unpack_bits,
)

EVERY_SPLIT = [(high, low) for high in range(2, 9) for low in range(1, high)]


def random_expert(
    hidden: int, inner: int, *, gated: bool = True, biased: bool = False, seed: int = 0
) -> ExpertMatrices:
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int, there: bool = True) -> Tensor | None:
        return torch.randn(*shape, generator=rng) if there else None

    up, down = draw(inner, hidden), draw(hidden, inner)
    assert up is not None
    assert down is not None
    return ExpertMatrices(
        gate=draw(inner, hidden, there=gated),
        up=up,
        down=down,
        gate_bias=draw(inner, there=gated and biased),
        up_bias=draw(inner, there=biased),
        down_bias=draw(hidden, there=biased),
        activation=lambda gate, straight: straight,
    )


def packed_bytes(geometry: Geometry, high: int, low: int, group: int = 32) -> tuple[int, int]:
    assert geometry.hidden is not None
    assert geometry.moe_intermediate is not None
    expert = random_expert(
        geometry.hidden,
        geometry.moe_intermediate,
        gated=geometry.expert_matrices == 3,
        biased=geometry.expert_biases,
    )
    how = SliceFormat.of(expert, high, low, group)
    slices = pack(sliced(expert, high, group), how)
    assert how.nbytes == (len(slices.msb), len(slices.lsb))
    return len(slices.msb), len(slices.lsb)


def same(a: SlicedExpert, b: SlicedExpert) -> bool:
    def alike(x: Quantised, y: Quantised) -> bool:
        return x.bits == y.bits and all(
            torch.equal(p, q)
            for p, q in zip((x.codes, x.zeros, x.scales), (y.codes, y.zeros, y.scales), strict=True)
        )

    def equal(x: Tensor | None, y: Tensor | None) -> bool:
        return x is y is None or (x is not None and y is not None and torch.equal(x, y))

    return (
        alike(a.up, b.up)
        and alike(a.down, b.down)
        and equal(a.up_bias, b.up_bias)
        and equal(a.down_bias, b.down_bias)
    )


def nested(expert: SlicedExpert, bits: int) -> SlicedExpert:
    return replace(expert, up=expert.up.nested(bits), down=expert.down.nested(bits))


@given(st.integers(1, 8), st.lists(st.integers(0, 255), max_size=40))
def test_a_stream_is_the_values_bits_one_after_another(bits: int, values: list[int]) -> None:
    values = [value % 2**bits for value in values]
    written = "".join(f"{value:0{bits}b}"[::-1] for value in values)
    written += "0" * (-len(written) % 8)
    expected = [int(written[at : at + 8][::-1], 2) for at in range(0, len(written), 8)]
    stream = pack_bits(torch.tensor(values, dtype=torch.uint8), bits)

    assert stream.tolist() == expected
    assert unpack_bits(stream, len(values), bits).tolist() == values


@pytest.mark.parametrize(("high", "low"), EVERY_SPLIT)
@pytest.mark.parametrize(
    ("hidden", "inner", "group", "gated", "biased"),
    [
        (64, 32, 32, True, False),
        (15, 21, 3, True, True),  # nothing is a power of two
        (5, 7, 1, False, True),
        (36, 20, 4, False, False),
        (7, 7, 7, True, True),
    ],
)
def test_slices_hold_an_expert_exactly(
    high: int, low: int, hidden: int, inner: int, group: int, gated: bool, biased: bool
) -> None:
    expert = random_expert(hidden, inner, gated=gated, biased=biased)
    how = SliceFormat.of(expert, high, low, group)
    codes = sliced(expert, high, group)
    msb, lsb = pack(codes, how)

    assert msb.dtype == lsb.dtype == torch.uint8
    assert (len(msb), len(lsb)) == how.nbytes
    assert same(unpack(how, msb, lsb), codes)
    assert same(unpack(how, msb), nested(codes, low))


@pytest.mark.parametrize("name", ["moe-tiny", "qwen1.5-moe-a2.7b", "granite-3-1b-a400m"])
@pytest.mark.parametrize(("high", "low"), [(8, 4), (6, 3), (4, 2)])
def test_packed_bytes_are_the_bytes_charged(name: str, high: int, low: int) -> None:
    geometry = load_geometry(name)

    assert packed_bytes(geometry, high, low) == bit_slice_bytes(geometry, high, low)


@pytest.mark.parametrize(
    "name",
    ["deepseek-v2-lite", "qwen3-30b-a3b", pytest.param("gpt-oss-20b", marks=pytest.mark.slow)],
)
def test_packed_bytes_are_the_bytes_charged_for_large_experts(name: str) -> None:
    geometry = load_geometry(name)

    assert packed_bytes(geometry, 6, 3) == bit_slice_bytes(geometry, 6, 3)


@given(
    split=st.sampled_from(EVERY_SPLIT),
    group=st.integers(1, 9),
    n_groups=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    matrices=st.integers(2, 3),
    biased=st.booleans(),
)
def test_packed_bytes_are_the_bytes_charged_for_odd_geometries(
    split: tuple[int, int], group: int, n_groups: tuple[int, int], matrices: int, biased: bool
) -> None:
    geometry = Geometry(
        name="odd",
        n_experts=1,
        top_k=1,
        moe_layers=[0],
        hidden=group * n_groups[0],
        moe_intermediate=group * n_groups[1],
        expert_matrices=matrices,
        expert_biases=biased,
    )

    assert packed_bytes(geometry, *split, group) == bit_slice_bytes(geometry, *split, group)


def test_a_slice_has_the_layout_of_the_table() -> None:
    """Two bits and groups of one weight: a negative one has zero-point 3, code 0; others 0, 3."""
    expert = ExpertMatrices(
        gate=torch.tensor([[-1.0, 2.0]]),  # scales 1/3, 2/3
        up=torch.tensor([[0.0, 3.0]]),  # an empty group has scale 1
        down=torch.tensor([[-2.0], [1.5]]),  # scales 2/3, 1/2
        gate_bias=torch.tensor([1.0]),
        up_bias=torch.tensor([2.0]),
        down_bias=torch.tensor([0.5, -0.5]),
        activation=lambda gate, straight: straight,
    )
    how = SliceFormat.of(expert, 2, 1, 1)
    slices = pack(sliced(expert, 2, 1), how)
    one_third, two_thirds, one, half = (
        torch.tensor([x]).half().view(torch.uint8).tolist() for x in (1 / 3, 2 / 3, 1.0, 0.5)
    )
    biases = torch.tensor([1.0, 2.0, 0.5, -0.5], dtype=torch.bfloat16).view(torch.uint8).tolist()
    # the third and two thirds above are rounded up: their nearest float16 lie below
    above = [one_third[0] + 1, one_third[1]], [two_thirds[0] + 1, two_thirds[1]]
    up = [0b1010, 0b0001, *above[0], *above[1], *[0, 0x3C], *one, *biases[:4]]
    down = [0b10, 0b01, *above[1], *half, *biases[4:]]

    assert slices.msb.tolist() == up + down
    assert slices.lsb.tolist() == [0b1010, 0b0001, 0b10, 0b01]


def test_biases_and_gates_come_back_by_name() -> None:
    expert = random_expert(8, 4, biased=True)
    how = SliceFormat.of(expert, 8, 4, 4)
    found = unpack(how, *pack(sliced(expert, 8, 4), how)).tensors(gated=True)
    given_tensors = {**expert.matrices(), **expert.biases()}

    assert sorted(found) == sorted(given_tensors)
    for name, value in given_tensors.items():
        torch.testing.assert_close(found[name], value, rtol=0.01, atol=0.02)


def test_an_expert_without_gate_has_no_gate() -> None:
    expert = random_expert(8, 4, gated=False, biased=True)

    assert sorted(sliced(expert, 4, 4).tensors(gated=False)) == sorted(
        ["up", "down", "up_bias", "down_bias"]
    )


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_error_is_at_most_one_step(bits: int) -> None:
    expert = random_expert(64, 96)
    codes = sliced(expert, bits)
    assert expert.gate is not None
    up = torch.cat([expert.gate, expert.up])
    for quantised, matrix in ((codes.up, up), (codes.down, expert.down)):
        error = (quantised.weights() - matrix).abs().view(*matrix.shape[:1], -1, 32)

        assert (error <= quantised.scales * (1 + 1e-6)).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["gate", "up", "down", "down_bias"])
def test_weights_that_are_no_numbers_are_refused_by_name(value: float, part: str) -> None:
    expert = random_expert(32, 32, biased=True)
    getattr(expert, part).view(-1)[3] = value
    with pytest.raises(InputError, match=rf"layers\.3\.{part}: 1 of \d+ weights are NaN"):
        sliced(expert, 4, name="layers.3")


def test_weights_too_large_for_a_16_bit_scale_are_refused_by_name() -> None:
    expert = random_expert(32, 32)
    expert.down[0, 0] = 1e7
    with pytest.raises(InputError, match=r"expert\.down: a scale of .* does not fit"):
        sliced(expert, 4)


def test_a_group_that_does_not_divide_a_row_is_refused() -> None:
    with pytest.raises(InputError, match="rows of 48 weights have no whole number of groups of 32"):
        SliceFormat.of(random_expert(64, 48), 8, 4)
    with pytest.raises(InputError, match=r"x\.down: rows of 48 weights have no whole number"):
        sliced(random_expert(64, 48), 8, name="x")
    with pytest.raises(InputError, match="groups of 0"):
        SliceFormat.of(random_expert(64, 48), 8, 4, 0)


@pytest.mark.parametrize(("high", "low"), [*pairwise(range(1, 4)), (9, 4), (4, 0), (4, 4)])
def test_bits_that_make_no_slices_are_refused(high: int, low: int) -> None:
    with pytest.raises(InputError, match="are out of range; use 1 <= low < high <= 8"):
        SliceFormat.of(random_expert(32, 32), high, low)


def test_a_slice_of_another_size_is_refused() -> None:
    expert = random_expert(32, 32)
    how = SliceFormat.of(expert, 8, 4)
    msb, lsb = pack(sliced(expert, 8), how)
    with pytest.raises(InputError, match=rf"MSB slice has {len(msb) - 1} bytes, .* {len(msb)}"):
        unpack(how, msb[1:], lsb)
    with pytest.raises(InputError, match="the LSB slice has 0 bytes"):
        unpack(how, msb, lsb[:0])
