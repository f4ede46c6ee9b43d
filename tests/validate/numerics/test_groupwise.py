"""Check the group-wise quantiser against plain arithmetic, one number at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moetier.validate.numerics.groupwise import GROUP, half_above, quantise, requantised


def random_weights(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference(group: list[float], bits: int, nested: int | None = None) -> list[float]:
    """Quantise one group as a textbook would, without tensors."""
    low, high = min(*group, 0.0), max(*group, 0.0)
    top = 2**bits - 1
    scale = (high - low) / top or 1.0
    zero = min(max(round(-low / scale), 0), top)
    codes = [min(max(round(w / scale) + zero, 0), top) for w in group]
    if nested is not None:
        drop = bits - nested
        codes, zero, scale = [c // 2**drop for c in codes], zero // 2**drop, scale * 2**drop
    return [(c - zero) * scale for c in codes]


@settings(deadline=None)
@given(
    group=st.lists(st.floats(-10, 10, allow_subnormal=False), min_size=4, max_size=4),
    bits=st.integers(1, 8),
    data=st.data(),
)
def test_a_group_equals_plain_arithmetic(
    group: list[float], bits: int, data: st.DataObject
) -> None:
    nested = data.draw(st.none() | st.integers(1, bits))
    weights = torch.tensor(group, dtype=torch.float64)
    actual = quantise(weights, bits, group=4)
    chosen = actual if nested is None else actual.nested(nested)

    assert chosen.weights().tolist() == pytest.approx(reference(group, bits, nested), abs=1e-12)


def test_a_worked_example() -> None:
    """Range -1 to 2 in 2 bits: scale 1, zero-point 1, codes 0 to 3."""
    quantised = quantise(torch.tensor([-1.0, 2.0, 0.4, 0.9]), bits=2, group=4)

    assert quantised.scales.tolist() == [[1.0]]
    assert quantised.zeros.tolist() == [[1]]
    assert quantised.codes.tolist() == [[0, 3, 1, 2]]
    assert quantised.weights().tolist() == [-1.0, 2.0, 0.0, 1.0]


def test_a_worked_nested_example() -> None:
    """Codes 0, 3, 1, 2 lose their low bit: 0, 1, 0, 1; zero-point 1 becomes 0, the scale 2."""
    nested = quantise(torch.tensor([-1.0, 2.0, 0.4, 0.9]), bits=2, group=4).nested(1)

    assert nested.codes.tolist() == [[0, 1, 0, 1]]
    assert nested.weights().tolist() == [0.0, 2.0, 0.0, 2.0]


def test_groups_do_not_influence_each_other() -> None:
    weights = random_weights(3, 5, 4 * GROUP)
    groups = weights.reshape(-1, GROUP)
    alone = torch.cat([requantised(group, 4) for group in groups])

    assert torch.equal(requantised(weights, 4), alone.view(weights.shape))


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_fit_their_bits(bits: int) -> None:
    quantised = quantise(random_weights(8, 64), bits)

    assert quantised.bits == bits
    for part in (quantised.codes, quantised.zeros):
        assert part.dtype == torch.int32
        assert part.min() >= 0
        assert part.max() <= 2**bits - 1


@pytest.mark.parametrize("bits", range(2, 9))
def test_the_error_is_at_most_one_step(bits: int) -> None:
    """Half a step from rounding, and half from the rounded zero-point at a group's edges."""
    weights = random_weights(8, 64)
    quantised = quantise(weights, bits)
    error = (quantised.weights() - weights).abs().reshape(8, 2, GROUP)

    assert (error <= quantised.scales * (1 + 1e-9)).all()


def test_more_bits_are_never_worse() -> None:
    weights = random_weights(64, 128)
    errors = [float((requantised(weights, bits) - weights).square().mean()) for bits in range(1, 9)]

    assert errors == sorted(errors, reverse=True)


def test_nesting_costs_more_than_quantising_directly() -> None:
    weights = random_weights(64, 128)
    nested = (requantised(weights, 4, nested=2) - weights).square().mean()
    direct = (requantised(weights, 2) - weights).square().mean()

    assert nested > direct


def test_nesting_all_bits_changes_nothing() -> None:
    quantised = quantise(random_weights(4, 64), 4)

    assert torch.equal(quantised.nested(4).weights(), quantised.weights())


def test_zero_stays_zero() -> None:
    weights = random_weights(4, 64)
    weights[:, ::3] = 0
    weights[0] = 0

    assert (requantised(weights, 3)[weights == 0] == 0).all()
    assert (requantised(weights, 4, nested=1)[weights == 0] == 0).all()


def test_the_type_of_the_weights_is_kept() -> None:
    assert requantised(torch.ones(2, 32, dtype=torch.float32), 4).dtype == torch.float32
    assert requantised(torch.ones(2, 32, dtype=torch.float64), 4).dtype == torch.float64


@pytest.mark.parametrize("bits", [0, 9])
def test_bits_out_of_range_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=f"{bits} bits are out of range; choose 1 to 8"):
        quantise(torch.ones(32), bits)


def test_nesting_more_bits_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="5 bits are out of range; choose 1 to 4"):
        quantise(torch.ones(32), 4).nested(5)


def test_a_ragged_input_dimension_is_refused() -> None:
    with pytest.raises(ValueError, match="an input dimension of 33 has no whole number"):
        quantise(torch.ones(2, 33), 4)


@given(st.lists(st.floats(2.0**-40, 65504, width=32), min_size=1, max_size=8))
def test_a_half_above_is_the_nearest_one(values: list[float]) -> None:
    given_values = torch.tensor(values)
    above = half_above(given_values)
    below = torch.from_numpy(np.nextafter(above.half().numpy(), np.float16(0))).float()

    assert torch.equal(above.half().float(), above)
    assert (above >= given_values).all()
    assert (below < given_values).all()


@pytest.mark.parametrize("size", [1e-9, 1e-4, 0.02, 3.0])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_half_scales_lose_no_range(size: float, bits: int) -> None:
    weights = size * random_weights(16, 64).float()
    quantised = quantise(weights, bits, half_scales=True)
    error = (quantised.weights() - weights).abs().reshape(16, 2, GROUP)

    assert torch.equal(quantised.scales.half().float(), quantised.scales)
    assert (error <= quantised.scales * (1 + 1e-6)).all()


def test_a_scale_beyond_16_bits_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a scale of 1e\+06 does not fit into 16 bits"):
        quantise(torch.full((32,), 3e6), 2, half_scales=True)
