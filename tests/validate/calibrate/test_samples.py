"""Repeats: how many, which count, and how far they vary."""

from collections.abc import Iterator
from fractions import Fraction
from itertools import count

import pytest

from moetier.validate.calibrate.samples import LEAST, MOST, Sample, alternate, repeat


def test_the_median_stands_and_the_middle_half_is_the_spread() -> None:
    sample = Sample((100, 400, 90, 110, 105))

    assert sample.ns == 105
    assert sample.spread == Fraction(95, 1000)  # (110 - 100) / 105, to a tenth of a per cent


def test_one_value_has_no_spread_and_nothing_is_quicker_than_a_nanosecond() -> None:
    assert Sample((7,)).ns == 7
    assert Sample((7,)).spread == Fraction(0)
    assert Sample((0, 0, 0)).ns == 1


def clock(step: int) -> Iterator[int]:
    return count(0, step)


@pytest.mark.parametrize(("step_s", "expected"), [(11, LEAST), (1, LEAST + 9), (0, MOST)])
def test_repeats_fit_the_time_within_bounds(step_s: int, expected: int) -> None:
    ticks, values = clock(step_s * 10**9), count(1000)
    found = repeat(lambda: next(values), 10, lambda: next(ticks))

    assert len(found.values) == expected
    assert found.values[0] == 1001  # the first is not kept


def test_what_alternates_runs_in_turn_and_pairs_up() -> None:
    order: list[str] = []
    ticks = clock(10**9)

    def one(name: str) -> int:
        order.append(name)
        return len(order)

    first, second = alternate(lambda: one("a"), lambda: one("b"), 5, lambda: next(ticks))

    assert "".join(order) == "ab" * (len(order) // 2)
    assert [b - a for a, b in zip(first.values, second.values, strict=True)] == [1] * len(
        first.values
    )
