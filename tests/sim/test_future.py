"""The future of a run: what batches need, and when a slice comes again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetier.sim.future import Future

NEEDED = [[3, 1], [2], [], [1, 3], [1]]


def test_needed_is_what_was_recorded_and_nothing_beyond_the_end() -> None:
    future = Future(NEEDED)

    assert [future.needed(batch) for batch in range(5)] == NEEDED
    assert future.needed(5) == future.needed(99) == []
    assert future.never == 5


def test_next_uses_of_a_batch() -> None:
    future = Future(NEEDED)

    assert future.next_uses(0) == {3: 3, 1: 3}
    assert future.next_uses(1) == {2: 5}
    assert future.next_uses(2) == {}
    assert future.next_uses(3) == {1: 4, 3: 5}
    assert future.next_uses(-1) == {}


@pytest.mark.parametrize(
    ("s", "after", "use"), [(1, -1, 0), (1, 0, 3), (1, 2, 3), (1, 3, 4), (1, 4, 5), (9, -1, 5)]
)
def test_next_use_is_later_than_the_batch_given(s: int, after: int, use: int) -> None:
    assert Future(NEEDED).next_use(s, after) == use


@given(st.lists(st.lists(st.integers(0, 5), max_size=4, unique=True), max_size=12))
def test_both_ways_of_asking_agree(needed: list[list[int]]) -> None:
    future = Future(needed)
    for batch in range(len(needed)):
        assert future.next_uses(batch) == {s: future.next_use(s, batch) for s in needed[batch]}


def test_an_empty_run_has_no_future() -> None:
    assert Future([]).never == 0
    assert Future([]).next_use(0, -1) == 0
