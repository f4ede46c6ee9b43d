"""Tests of which policy a search recommends."""

from __future__ import annotations

from typing import Any

from moetier.experiments.search_choice import choose, closest, excess
from moetier.experiments.search_config import Goal, Limit

FAST, SMALL = Goal("tpot_ms", "lower"), Goal("capacity.dram", "lower")
RIGHT = Goal("accuracy", "higher")
ENOUGH = Limit("accuracy", "higher", 0.9)


def row(tpot_ms: float | None, accuracy: float | None = None, size: float = 0) -> dict[str, Any]:
    return {"tpot_ms": tpot_ms, "accuracy": accuracy, "capacity_bytes.dram": size}


def test_the_front_is_the_feasible_rows_that_nothing_beats() -> None:
    rows = [row(3, 0.95), row(1, 0.5), row(2, 0.9), row(4, 0.95), row(9, 1.0)]

    found = choose(rows, [FAST, RIGHT], [ENOUGH])

    assert found.front == [rows[2], rows[0], rows[4]]  # by the first objective
    assert found.best == rows[2]
    assert found.rule == "the best tpot_ms among those with accuracy >= 0.9"


def test_ties_in_the_first_objective_are_decided_by_the_next() -> None:
    rows = [row(2, 0.9, 30), row(2, 0.9, 10), row(2, 1.0, 20)]

    found = choose(rows, [FAST, RIGHT, SMALL], [ENOUGH])

    assert found.best == rows[2]


def test_one_objective_has_one_best() -> None:
    rows = [row(3), row(2), row(2)]

    found = choose(rows, [FAST], [])

    assert found.front == rows[1:]
    assert found.best is rows[1]
    assert found.rule == "the best tpot_ms"


def test_without_limits_the_knee_is_taken() -> None:
    rows = [row(1, size=100), row(2, size=20), row(10, size=10), row(11, size=11)]

    found = choose(rows, [FAST, SMALL], [])

    assert found.front == rows[:3]
    assert found.best == rows[1]  # (0.11, 0.11) is nearer to (0, 0) than (0, 1) and (1, 0)
    assert "nearest" in found.rule


def test_an_objective_that_all_share_does_not_move_the_knee() -> None:
    rows = [row(1, size=5), row(1, size=5)]

    assert choose(rows, [FAST, SMALL], []).best == rows[0]


def test_what_is_null_is_neither_on_the_front_nor_feasible() -> None:
    assert choose([row(None, 1.0), row(2, 0.95)], [FAST, RIGHT], []).front == [row(2, 0.95)]
    assert choose([row(1, None)], [FAST], [ENOUGH]).best is None
    assert excess(row(1, None), [ENOUGH]) == [float("inf")]


def test_the_closest_misses_its_worst_limit_by_least() -> None:
    limits = [ENOUGH, Limit("tpot_ms", "lower", 10)]
    rows = [row(10, 0.45), row(12, 0.9), row(11, 0.81), row(1, None)]

    found = choose(rows, [FAST], limits)

    assert (found.front, found.best) == ([], None)
    assert found.rule == "no trial meets every constraint"
    assert closest(rows, limits) == rows[2]  # misses both by 10 %; the others one by 50 and 20 %


def test_nothing_is_closest_to_what_nobody_knows() -> None:
    assert closest([row(1, None)], [ENOUGH]) is None
    assert closest([], [ENOUGH]) is None
