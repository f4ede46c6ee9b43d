"""When a text counts as fallen into a loop."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="validation needs the extra 'models'")

from moetier.validate.evaluate_loops import LONGEST_PERIOD, TAIL, loops


@pytest.mark.parametrize("period", [1, 2, 3, 7, 15, LONGEST_PERIOD])
def test_a_piece_that_fills_the_tail_is_a_loop(period: int) -> None:
    piece = list(range(period))
    beginning = [90, 91, 92]

    assert loops(beginning + (piece * TAIL)[:TAIL])
    assert loops((piece * TAIL)[:TAIL])


@pytest.mark.parametrize("period", [1, 2, 7, LONGEST_PERIOD])
def test_one_other_token_in_the_tail_breaks_it(period: int) -> None:
    for at in (0, TAIL // 2, TAIL - 1):
        tokens = (list(range(period)) * TAIL)[:TAIL]
        tokens[at] = 99

        assert not loops(tokens)


def test_what_came_before_the_tail_does_not_count() -> None:
    assert loops([99] + [5] * TAIL)
    assert not loops([5] * TAIL + list(range(TAIL)))


def test_a_longer_period_is_no_loop() -> None:
    assert not loops(list(range(LONGEST_PERIOD + 1)) * 4)


@pytest.mark.parametrize("n", [0, 1, TAIL - 1])
def test_too_few_tokens_cannot_loop(n: int) -> None:
    assert not loops([5] * n)
