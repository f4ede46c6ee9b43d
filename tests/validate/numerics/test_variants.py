"""Check each variant against plain arithmetic, one number at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moetier.validate.numerics.variants import VARIANTS, high_bits, independent, nested, symmetric

SPLITS = [(8, 4), (6, 3), (4, 2)]


def random_weights(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def half_above(value: float) -> float:
    """Return the nearest float16 from above, by trying the two next to *value*."""
    half = torch.tensor(value, dtype=torch.float64).half()
    up = torch.nextafter(half.float(), torch.tensor(float("inf")))
    found = [half.item(), (up.view(torch.int32) + 8192).view(torch.float32).half().item()]
    return min(x for x in found if x >= value)


def plain(name: str, group: list[float], high: int, low: int) -> list[float]:
    """Make *group* the variant *name*, by the table in the module and without tensors."""
    d = high - low
    if name == "symmetric":
        top = 2 ** (high - 1) - 1
        s = half_above(max(map(abs, group)) / top or 1.0)
        codes = [min(max(round(w / s), -top), top) for w in group]
        return [(q // 2**d) * s * 2**d for q in codes]
    bits = low if name == "independent" else high
    top = 2**bits - 1
    floor, ceiling = min(*group, 0.0), max(*group, 0.0)
    s = half_above((ceiling - floor) / top or 1.0)
    z = min(max(round(-floor / s), 0), top)
    codes = [min(max(round(w / s) + z, 0), top) for w in group]
    return {
        "high": [s * (q - z) for q in codes],
        "independent": [s * (q - z) for q in codes],
        "nested": [s * 2**d * (q // 2**d - z // 2**d) for q in codes],
        "zero untouched": [s * 2**d * (q // 2**d - z) for q in codes],
        "zero exact": [s * (2**d * (q // 2**d) - z) for q in codes],
    }[name]


@pytest.mark.parametrize("name", VARIANTS)
@given(
    group=st.lists(st.integers(-4096, 4096), min_size=4, max_size=4),
    split=st.sampled_from([*SPLITS, (3, 2), (8, 1)]),
)
def test_a_variant_equals_plain_arithmetic(
    name: str, group: list[int], split: tuple[int, int]
) -> None:
    weights = [w / 1024 for w in group]
    actual = VARIANTS[name](torch.tensor(weights, dtype=torch.float64), *split, 4)

    assert actual.tolist() == pytest.approx(plain(name, weights, *split), abs=1e-12)


def test_a_worked_example() -> None:
    """Scale 1/4, zero-point 5, codes 0, 5, 7, 15 in 4 bits; 0, 1, 1, 3 and 1 in 2 bits."""
    weights = torch.tensor([-1.25, 0.0, 0.5, 2.5])
    found = {name: variant(weights, 4, 2, 4).tolist() for name, variant in VARIANTS.items()}

    assert found == {
        "high": [-1.25, 0.0, 0.5, 2.5],
        "nested": [-1.0, 0.0, 0.0, 2.0],
        "independent": [-1.25, 0.0, 0.0, 2.5],
        "symmetric": found["symmetric"],
        "zero untouched": [-5.0, -4.0, -4.0, -2.0],
        "zero exact": [-1.25, -0.25, -0.25, 1.75],
    }
    # codes -3, 0, 1, 7 at scale 5/14, floored to -4, 0, 0, 4
    assert found["symmetric"] == pytest.approx([-10 / 7, 0, 0, 10 / 7], rel=1e-3)


@pytest.mark.parametrize("split", SPLITS)
def test_errors_are_ordered_as_the_arithmetic_says(split: tuple[int, int]) -> None:
    weights = random_weights(64, 128)
    errors = {
        name: float((variant(weights, *split, 32) - weights).square().mean())
        for name, variant in VARIANTS.items()
    }

    assert errors["high"] < errors["independent"] < errors["nested"] < errors["symmetric"]
    assert errors["zero untouched"] > 10 * errors["nested"]


@pytest.mark.parametrize("name", VARIANTS)
def test_groups_do_not_influence_each_other_and_shapes_stay(name: str) -> None:
    weights = random_weights(3, 5, 96)
    groups = weights.reshape(-1, 32)
    alone = torch.cat([VARIANTS[name](group, 4, 2, 32) for group in groups])

    assert torch.equal(VARIANTS[name](weights, 4, 2, 32), alone.view(weights.shape))


@pytest.mark.parametrize("name", VARIANTS)
def test_an_empty_group_stays_empty(name: str) -> None:
    assert not VARIANTS[name](torch.zeros(2, 32), 4, 2, 32).any()


def test_what_a_variant_does_not_use_makes_no_difference() -> None:
    weights = random_weights(4, 64)

    assert torch.equal(high_bits(weights, 8, 4), high_bits(weights, 8, 2))
    assert torch.equal(independent(weights, 8, 3), independent(weights, 6, 3))
    assert not torch.equal(nested(weights, 8, 3), nested(weights, 6, 3))


def test_symmetric_codes_of_one_bit_more_are_cut_downwards() -> None:
    """Codes -1, 0 and 1 of 2 bits lose one: to -2, 0 and 0."""
    assert symmetric(torch.tensor([-1.0, 0.0, 1.0, 0.25]), 2, 1, 4).tolist() == [-2, 0, 0, 0]
