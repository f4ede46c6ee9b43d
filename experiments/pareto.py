"""This module finds the points that no other point beats."""

from __future__ import annotations

from collections.abc import Sequence

from moetier.experiments.quantities import Direction


def front(points: Sequence[Sequence[float]], better: Sequence[Direction]) -> list[bool]:
    """Return for each of *points* whether it is on the front.

    A point is off the front when another is at least as good in every coordinate and better in one;
    equal points share their fate. *better* says per coordinate whether lower or higher is better.
    A point with a NaN is off the front and beats nothing.
    """
    signs = [1 if way == "lower" else -1 for way in better]
    costs = [tuple(sign * value for sign, value in zip(signs, p, strict=True)) for p in points]
    known = [all(value == value for value in cost) for cost in costs]
    return [
        known[i] and not any(known[j] and _beats(costs[j], cost) for j in range(len(costs)))
        for i, cost in enumerate(costs)
    ]


def _beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
