"""Tests of the front of points that no other beats."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetier.experiments.pareto import front

NAN = float("nan")
WAYS: Any = st.sampled_from(["lower", "higher"])
POINTS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12)


@pytest.mark.parametrize(
    ("points", "on"),
    [
        ([], []),
        ([(1, 1)], [True]),
        ([(1, 2), (2, 1)], [True, True]),
        ([(1, 1), (2, 2)], [True, False]),
        ([(1, 1), (1, 2)], [True, False]),  # equal in one, worse in the other
        ([(1, 1), (1, 1)], [True, True]),  # a tie: both stay
        ([(1, 3), (2, 2), (3, 1), (3, 3), (2, 3)], [True, True, True, False, False]),
        ([(1, NAN), (2, 2)], [False, True]),
        ([(NAN, NAN)], [False]),
    ],
)
def test_lower_is_better_in_both(points: list[tuple[float, float]], on: list[bool]) -> None:
    assert front(points, ["lower", "lower"]) == on


def test_directions_go_by_coordinate() -> None:
    points = [(1, 1), (1, 2), (2, 2)]

    assert front(points, ["lower", "higher"]) == [False, True, False]
    assert front(points, ["higher", "lower"]) == [True, False, True]
    assert front(points, ["higher", "higher"]) == [False, False, True]


def test_any_number_of_coordinates() -> None:
    assert front([(1, 1, 1), (1, 1, 2)], ["lower", "lower", "lower"]) == [True, False]
    assert front([(3,), (1,), (1,)], ["lower"]) == [False, True, True]


@given(POINTS, WAYS, WAYS)
def test_what_is_off_is_beaten_and_what_is_on_is_not(
    points: list[tuple[int, int]], x: Any, y: Any
) -> None:
    on = front(points, [x, y])

    def beats(a: tuple[int, int], b: tuple[int, int]) -> bool:
        gains = [(b[0] - a[0]) * (1 if x == "lower" else -1)]
        gains.append((b[1] - a[1]) * (1 if y == "lower" else -1))
        return min(gains) >= 0 and max(gains) > 0

    for i, point in enumerate(points):
        beaten_by = [j for j, other in enumerate(points) if beats(other, point)]
        assert on[i] is (not beaten_by)
        assert on[i] or any(on[j] for j in beaten_by)


@given(POINTS)
def test_the_order_of_points_does_not_matter(points: list[tuple[int, int]]) -> None:
    forward = front(points, ["lower", "lower"])

    assert front(points[::-1], ["lower", "lower"]) == forward[::-1]


@given(POINTS)
def test_turning_a_coordinate_round_turns_its_direction(points: list[tuple[int, int]]) -> None:
    turned = [(-x, y) for x, y in points]

    assert front(turned, ["higher", "lower"]) == front(points, ["lower", "lower"])
