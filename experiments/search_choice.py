"""This module picks the policy to recommend from what a search has found, by a stated rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moetier.experiments.pareto import front
from moetier.experiments.quantities import Direction
from moetier.experiments.search_config import Goal, Limit, value_of

Row = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """The rows of the front, best first objective first, the one to take, and why that one."""

    front: list[Row]
    best: Row | None
    rule: str


def excess(row: Row, limits: Sequence[Limit]) -> list[float]:
    """Return by how much *row* misses each of *limits*; at most 0 where it holds."""
    return [limit.excess(value_of(row, limit.name)) for limit in limits]


def choose(rows: Sequence[Row], goals: Sequence[Goal], limits: Sequence[Limit]) -> Choice:
    """Return the front of the feasible *rows* and the one to recommend.

    Under limits it is the best in the first objective, ties decided by the next ones: the limits
    say how much of the others is enough. Without, it is the one nearest to the ideal point, every
    objective counted from the best (0) to the worst (1) of the front. Rows with a null objective
    are off the front.
    """
    feasible = [row for row in rows if all(over <= 0 for over in excess(row, limits))]
    points = [_point(row, goals) for row in feasible]
    lower: list[Direction] = ["lower" for _ in goals]
    on = front(points, lower)
    edge = sorted(
        (item for item, best in zip(zip(points, feasible, strict=True), on, strict=True) if best),
        key=lambda item: item[0],
    )
    if not edge:
        return Choice([], None, "no trial meets every constraint")
    found = [row for _, row in edge]
    if limits or len(goals) == 1:
        under = f" among those with {', '.join(map(str, limits))}" if limits else ""
        return Choice(found, found[0], f"the best {goals[0].name}{under}")
    knee = min(range(len(edge)), key=lambda at: _distance(at, [point for point, _ in edge]))
    names = ", ".join(goal.name for goal in goals)
    return Choice(found, found[knee], f"the front's nearest to the best of each of {names}")


def closest(rows: Sequence[Row], limits: Sequence[Limit]) -> Row | None:
    """Return the row whose largest excess over *limits* is smallest; None where nothing is known.

    A limit on what a row does not say is missed without measure.
    """
    worst = [(max(excess(row, limits)), at) for at, row in enumerate(rows)]
    known = [item for item in worst if item[0] != float("inf")]
    return rows[min(known)[1]] if known else None


def _point(row: Row, goals: Sequence[Goal]) -> tuple[float, ...]:
    """Return the objectives of *row*, turned so that lower is better; NaN where unknown."""
    values = [(value_of(row, goal.name), goal.better) for goal in goals]
    return tuple(
        float("nan") if value is None else value if better == "lower" else -value
        for value, better in values
    )


def _distance(at: int, points: list[tuple[float, ...]]) -> float:
    total = 0.0
    for values in zip(*points, strict=True):
        low, high = min(values), max(values)
        total += ((values[at] - low) / (high - low)) ** 2 if high > low else 0.0
    return total
