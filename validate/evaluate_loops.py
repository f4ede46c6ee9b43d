"""This module tells whether a text has fallen into a loop, which damaged models tend to."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_PERIOD = 16
REPEATS = 3
TAIL = LONGEST_PERIOD * REPEATS


def loops(tokens: Sequence[int]) -> bool:
    """Tell whether the last `TAIL` tokens have a period of at most `LONGEST_PERIOD`.

    That is, they are at least `REPEATS` repeats of one piece. Fewer tokens than `TAIL` do not loop.
    """
    tail = list(tokens[-TAIL:])
    if len(tail) < TAIL:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, LONGEST_PERIOD + 1))
