"""Check ternary codes against their definition, and packing by round trips."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moetier.traces.channels import row_trit_bytes
from moetier.traces.errors import InputError
from moetier.validate.numerics.channels.ternary import groups_of, pack, ternarise, unpack


@given(
    rows=st.integers(1, 70).flatmap(
        lambda n: st.lists(
            st.lists(st.integers(-1, 1), min_size=n, max_size=n), min_size=1, max_size=4
        )
    ),
    group=st.none() | st.integers(1, 40),
)
def test_packing_is_exact_and_takes_the_bytes_charged(
    rows: list[list[int]], group: int | None
) -> None:
    trits = torch.tensor(rows, dtype=torch.int8)
    packed = pack(trits, group)

    assert packed.dtype == torch.uint8
    assert packed.shape == (len(rows), row_trit_bytes(len(rows[0]), group))
    assert unpack(packed, len(rows[0]), group).equal(trits)


def test_a_byte_holds_five_trits_as_a_fraction_of_256() -> None:
    digits = [2, 0, 1, 1, 2]  # 2*81 + 0*27 + 1*9 + 1*3 + 2 = 176
    packed = pack(torch.tensor(digits, dtype=torch.int8) - 1)

    assert packed.tolist() == [-(-176 * 256 // 243)]


def test_all_codes_differ() -> None:
    every = torch.cartesian_prod(*[torch.tensor([-1, 0, 1], dtype=torch.int8)] * 5)

    assert len(set(pack(every).flatten().tolist())) == 243


def test_equal_digits_of_neighbouring_bytes_are_neighbouring_inputs() -> None:
    trits = torch.zeros(10, dtype=torch.int8)
    changed = trits.clone()
    changed[1] = 1  # first digit of the second of two bytes

    assert (pack(trits) != pack(changed)).tolist() == [False, True]


def test_trits_and_scales_by_hand() -> None:
    # mean magnitude 2, threshold 1.4; mean of the two above it 3.5
    trits, scales = ternarise(torch.tensor([[4.0, -3.0, 1.0, 0.0]]))

    assert trits.tolist() == [[1, -1, 0, 0]]
    assert scales.tolist() == [[3.5]]


def test_each_group_has_its_own_threshold_and_scale() -> None:
    row = torch.tensor([[4.0, -4.0, 0.5, 0.0, 0.0]])
    trits, scales = ternarise(row, group=2)

    assert trits.tolist() == [[1, -1, 1, 0, 0]]
    assert scales.tolist() == [[4.0, 0.5, 0.0]]


def test_threshold_zero_keeps_every_sign() -> None:
    trits, _ = ternarise(torch.tensor([[4.0, -0.001, 0.0]]), threshold=0.0)

    assert trits.tolist() == [[1, -1, 0]]


def test_the_scale_is_the_least_squares_fit() -> None:
    rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    trits, scales = ternarise(rows)
    fit = (rows * trits).sum(-1) / (trits.float() ** 2).sum(-1)

    torch.testing.assert_close(scales[:, 0].float(), fit, rtol=4e-3, atol=0)


def test_zeros_have_scale_zero() -> None:
    trits, scales = ternarise(torch.zeros(2, 8))

    assert not trits.any()
    assert not scales.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_must_be_finite(bad: float) -> None:
    with pytest.raises(InputError, match="NaN or infinite"):
        ternarise(torch.tensor([[1.0, bad]]))


def test_a_row_of_another_width_is_refused() -> None:
    with pytest.raises(InputError, match=r"2 bytes are no row of 11 trits \(3\)"):
        unpack(pack(torch.zeros(1, 10, dtype=torch.int8)), 11)


def test_widths_of_groups() -> None:
    assert groups_of(10, None) == [10]
    assert groups_of(10, 4) == [4, 4, 2]
    assert groups_of(10, 99) == [10]
