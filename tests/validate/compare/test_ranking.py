"""Tests of Kendall's tau against its definition, and of what cannot be told apart."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetier.validate.compare.ranking import Ranking, Timed, rank

Times = st.lists(
    st.tuples(st.integers(1, 50), st.lists(st.integers(1, 50), min_size=1, max_size=4)),
    min_size=2,
    max_size=8,
)


def timed(times: list[tuple[int, list[int]]]) -> list[Timed]:
    return [Timed(simulated, measured) for simulated, measured in times]


@given(Times)
def test_every_pair_is_counted_once(times: list[tuple[int, list[int]]]) -> None:
    found = rank(timed(times))

    pairs = found.concordant + found.discordant + found.undecided + found.ties
    assert pairs == len(times) * (len(times) - 1) // 2
    assert found.tau is None or -1 <= found.tau <= 1


@given(Times)
def test_order_does_not_matter_and_the_reverse_has_the_opposite_tau(
    times: list[tuple[int, list[int]]],
) -> None:
    found, reverse = rank(timed(times)), rank(Timed(-s, m) for s, m in times)

    assert rank(timed(times[::-1])) == found
    assert (reverse.concordant, reverse.discordant) == (found.discordant, found.concordant)
    assert (reverse.ties, reverse.undecided) == (found.ties, found.undecided)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=8))
def test_without_repeats_only_equal_measurements_are_ties(pairs: list[tuple[int, int]]) -> None:
    signs = [
        ((a > c) - (a < c)) * ((b > d) - (b < d))
        for (a, b), (c, d) in combinations(pairs, 2)
        if b != d
    ]
    found = rank(Timed(simulated, [measured]) for simulated, measured in pairs)

    assert found.tau == (pytest.approx(sum(signs) / len(signs)) if signs else None)


def test_medians_must_differ_by_more_than_the_mean_of_the_spreads() -> None:
    """Spreads of 2 and 4: medians 3 apart are a tie, and a little further they are none."""
    near, far = Timed(1, [9, 10, 11]), Timed(2, [11, 13, 15])

    assert rank([near, far]) == Ranking(ties=1)
    assert rank([near, Timed(2, [11.1, 13.1, 15.1])]) == Ranking(concordant=1)


def test_rankings_add_up() -> None:
    total = Ranking(1, 2, 3, 4) + Ranking(10, 20, 30, 40)

    assert total == Ranking(11, 22, 33, 44)
    assert total.tau == (11 - 22) / 66
    assert (Ranking() + Ranking(ties=5)).tau is None
