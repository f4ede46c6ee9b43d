"""Measured times: met exactly at their rows, straight between them, in proportion beyond."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetier.sim.hardware import Compute
from moetier.sim.machine.tables import (
    Surface,
    computed_experts,
    dense_surface,
    expert_surface,
)
from moetier.sim.testing import toy_profile
from moetier.sim.yaml_input import check
from moetier.traces.batch import DECODE, PREFILL
from moetier.traces.errors import InputError

ROWS = [(100, 1, 0, 50), (100, 4, 0, 80), (300, 1, 0, 90), (300, 4, 0, 180)]
LONG = [(100, 1, 10, 40), (100, 1, 30, 60), (100, 1, 50, 100)]


def surface(rows: list[tuple[int, int, int, int]]) -> tuple[Surface, list[str]]:
    said: list[str] = []
    return Surface("times", rows, said.append), said


def compute(**more: Any) -> Compute:
    return check(Compute, {"tier": "hbm", "peak": "1 GOP/s", "source": "a toy"} | more, "toy")


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_met_exactly(row: tuple[int, int, int, int]) -> None:
    times, said = surface(ROWS)

    assert times.at(row[0], row[1]) == row[3]
    assert said == []


@pytest.mark.parametrize(
    ("nbytes", "tokens", "expected"),
    [
        (200, 1, Fraction(70)),  # half way from 50 to 90
        (100, 2, Fraction(60)),  # a third of the way from 50 to 80
        (200, 2, Fraction(60 + 120, 2)),
        (Fraction(301, 3), 1, 50 + Fraction(1, 3) * Fraction(40, 200)),
    ],
)
def test_between_rows_time_is_linear_in_bytes_and_in_tokens(
    nbytes: Any, tokens: int, expected: Fraction
) -> None:
    times, said = surface(ROWS)

    assert times.at(nbytes, tokens) == expected
    assert said == []


@pytest.mark.parametrize(
    ("nbytes", "tokens", "expected", "what"),
    [
        (600, 1, 180, "sizes (100 to 300 B)"),
        (50, 4, 40, "sizes (100 to 300 B)"),
        (100, 8, 160, "numbers of tokens (1 to 4)"),
    ],
)
def test_beyond_the_rows_time_is_in_proportion_and_that_is_said(
    nbytes: int, tokens: int, expected: int, what: str
) -> None:
    times, said = surface(ROWS)

    assert times.at(nbytes, tokens) == expected
    assert set(said) == {f"times are extrapolated beyond the measured {what}"}


def test_fewer_tokens_than_were_measured_cost_no_less() -> None:
    times, said = surface([(100, 4, 0, 80), (100, 8, 0, 90)])

    assert times.at(100, 1) == 80
    assert len(said) == 1


@pytest.mark.parametrize(
    ("context", "expected"), [(0, 30), (10, 40), (20, 50), (40, 80), (50, 100), (60, 120)]
)
def test_the_context_goes_on_along_the_last_line(context: int, expected: int) -> None:
    times, said = surface(LONG)

    assert times.at(100, 1, context) == expected
    assert bool(said) == (not 10 <= context <= 50)


def test_a_longer_context_is_never_quicker_beyond_the_rows() -> None:
    """What noise measured as a fall is not carried on."""
    times, _ = surface([(100, 1, 10, 40), (100, 1, 20, 30)])

    assert [times.at(100, 1, n) for n in (0, 15, 20, 99)] == [40, 35, 30, 30]


def test_one_context_holds_for_all() -> None:
    times, said = surface([(100, 1, 10, 40)])

    assert times.at(100, 1, 999) == 40
    assert said == []


@given(st.integers(1, 999), st.integers(1, 99), st.integers(1, 9), st.integers(0, 9))
def test_of_rising_rows_nothing_falls(nbytes: int, tokens: int, more: int, longer: int) -> None:
    times, _ = surface([*ROWS, (500, 1, 0, 91), (500, 9, 0, 900)])
    least = times.at(nbytes, tokens)

    assert times.at(nbytes + more, tokens) >= least
    assert times.at(nbytes, tokens + more, longer) >= least


@given(st.lists(st.integers(100, 300), min_size=1, max_size=8))
def test_a_mixture_takes_what_its_experts_take_one_by_one(sizes: list[int]) -> None:
    times, _ = surface(ROWS)

    assert len(sizes) * times.at(Fraction(sum(sizes), len(sizes)), 1) == sum(
        times.at(size, 1) for size in sizes
    )


def test_computed_experts_are_counted_once_whatever_their_slices() -> None:
    """Two parts per expert: slices 0 and 1 are expert 0, slice 4 is of expert 2."""
    assert computed_experts([0, 1, 4, 9], [], 2) == 3
    assert computed_experts([0, 1, 4, 9], [4], 2) == 2
    assert computed_experts([0, 1, 4, 9], [], 1) == 4


def test_a_kernel_without_rows_is_named() -> None:
    row = {"kernel": "whole", "nbytes": "100 B", "tokens": 1, "time": "50 ns"}
    said: list[str] = []

    assert expert_surface(compute(experts=[row]), "codes", said.append) is None
    assert said == [
        "no times of kernel 'codes' were measured on the processor of tier 'hbm' (there are: "
        "whole); its experts are timed by a roofline"
    ]
    assert expert_surface(compute(), "codes", said.append) is None
    assert len(said) == 1  # a profile without tables is a roofline anyway


def test_a_phase_without_rows_is_named() -> None:
    row = {"nbytes": "100 B", "tokens": 1, "context": 5, "time": "50 ns"}
    said: list[str] = []
    found = dense_surface(compute(dense=[row]), DECODE, said.append)

    assert found is not None
    assert found.at(100, 1, 5) == 50
    assert dense_surface(compute(dense=[row]), PREFILL, said.append) is None
    assert "no times of prefill were measured" in said[0]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"kernel": "whole", "nbytes": "100 B", "tokens": 0, "time": "5 ns"}, "experts.0.tokens"),
        ({"kernel": "whole", "nbytes": "100 B", "tokens": 1, "time": "0 ns"}, "above zero"),
        ({"kernel": "whole", "nbytes": 100, "tokens": 1, "time": "5 ns"}, "'24 GiB'"),
        ({"kernel": "whole", "bytes": "100 B", "tokens": 1, "time": "5 ns"}, "unknown key"),
    ],
)
def test_rows_that_make_no_sense_are_refused(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        compute(experts=[row])


def test_one_thing_is_measured_once() -> None:
    row = {"kernel": "whole", "nbytes": "100 B", "tokens": 1, "time": "50 ns"}

    with pytest.raises(InputError, match=r"2 rows for \(whole, 100, 1\); keep one"):
        compute(experts=[row, row | {"time": "51 ns"}])


def test_tables_survive_writing_and_reading() -> None:
    rows = [{"kernel": "codes", "nbytes": "1 kB", "tokens": 2, "time": "50 ns"}]
    dense = [{"phase": "prefill", "nbytes": "1 kB", "tokens": 2, "context": 3, "time": "7 us"}]
    profile = toy_profile(gpu={"experts": rows, "dense": dense})
    again = type(profile).model_validate(profile.model_dump(mode="json"))

    assert again == profile
    assert again.main_compute.experts[0].time == 50
