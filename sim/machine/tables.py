"""This module reads measured compute times off a profile, and between its rows.

A batch of experts takes

    overhead + U * time(bytes / U, tokens / U)

for U different experts: exact where they are alike, and, where rows and sizes are on one straight
line, also for a mixture, such as experts in one bit slice beside others in two. Between rows, time
is linear in bytes, in tokens and in the context. Beyond the largest it grows in proportion to bytes
and to tokens, and below the smallest it shrinks in proportion to bytes; it does not shrink below
the fewest tokens, because the weights have to be read even for one. In the context it goes on along
the last line, never falling. All arithmetic is exact, and rounded up once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

from moetier.sim.calibrated import DenseRow, ExpertRow
from moetier.sim.hardware import Compute
from moetier.traces.batch import PHASES

Number = int | Fraction
Curve = tuple[list[int], list[int]]  # contexts, ascending, and the time at each
Remark = Callable[[str], object]


class Surface:
    """Measured times over bytes, tokens and context."""

    def __init__(
        self, name: str, rows: Sequence[tuple[int, int, int, int]], remark: Remark
    ) -> None:
        """Take *rows* of (bytes, tokens, context, ns), one at least.

        *remark* hears, in words, when a time beyond the rows is asked for; *name* says of what.
        """
        self._name, self._remark = name, remark
        by_size: dict[int, dict[int, dict[int, int]]] = {}
        for nbytes, tokens, context, ns in rows:
            by_size.setdefault(nbytes, {}).setdefault(tokens, {})[context] = ns
        self._sizes = sorted(by_size)
        self._tokens = [sorted(by_size[size]) for size in self._sizes]
        self._curves = [
            [_curve(by_size[size][count]) for count in counts]
            for size, counts in zip(self._sizes, self._tokens, strict=True)
        ]

    def at(self, nbytes: Number, tokens: Number, context: Number = 0) -> Fraction:
        """Return the time in ns of *nbytes* of weights on *tokens* tokens."""
        sizes = self._sizes
        if not sizes[0] <= nbytes <= sizes[-1]:
            self._beyond("sizes", sizes, " B")
        nbytes = Fraction(nbytes)
        if nbytes < sizes[0]:
            return self._of_size(0, tokens, context) * nbytes / sizes[0]
        return _between(sizes, nbytes, lambda i: self._of_size(i, tokens, context))

    def _of_size(self, size: int, tokens: Number, context: Number) -> Fraction:
        counts, curves = self._tokens[size], self._curves[size]
        if not counts[0] <= tokens <= counts[-1]:
            self._beyond("numbers of tokens", counts)
        tokens = max(Fraction(tokens), Fraction(counts[0]))
        return _between(counts, tokens, lambda i: self._of_context(curves[i], context))

    def _of_context(self, curve: Curve, context: Number) -> Fraction:
        contexts, times = curve
        if len(contexts) == 1:
            return Fraction(times[0])
        if not contexts[0] <= context <= contexts[-1]:
            self._beyond("contexts", contexts)
        upper = min(max(bisect_left(contexts, context), 1), len(contexts) - 1)
        x0, x1, y0, y1 = contexts[upper - 1], contexts[upper], times[upper - 1], times[upper]
        slope = Fraction(y1 - y0, x1 - x0)
        if not x0 <= context <= x1:
            slope = max(slope, Fraction(0))
        end = (x1, y1) if context > x1 else (x0, y0)
        return max(end[1] + slope * (context - end[0]), Fraction(0))

    def _beyond(self, what: str, ends: Sequence[int], unit: str = "") -> None:
        span = f"{ends[0]} to {ends[-1]}{unit}" if len(ends) > 1 else f"only {ends[0]}{unit}"
        self._remark(f"{self._name} are extrapolated beyond the measured {what} ({span})")


def _curve(points: dict[int, int]) -> Curve:
    contexts = sorted(points)
    return contexts, [points[context] for context in contexts]


def _between(xs: Sequence[int], x: Fraction, value: Callable[[int], Fraction]) -> Fraction:
    """Return the value at *x* >= the first of *xs*: on a straight line, in proportion beyond."""
    upper = bisect_left(xs, x)
    if upper == len(xs):
        return value(upper - 1) * x / xs[-1]
    y1 = value(upper)
    if x == xs[upper]:
        return y1
    x0, y0 = xs[upper - 1], value(upper - 1)
    return y0 + (y1 - y0) * (x - x0) / (xs[upper] - x0)


def expert_surface(compute: Compute, kernel: str, remark: Remark) -> Surface | None:
    """Return the times of *kernel*'s experts on a processor, or None where it has none.

    *remark* hears where a profile with tables lacks this one.
    """
    name = _name(compute)
    if not compute.experts:
        return None
    rows = [row for row in compute.experts if row.kernel == kernel]
    if not rows:
        known = ", ".join(dict.fromkeys(row.kernel for row in compute.experts))
        remark(
            f"no times of kernel '{kernel}' were measured on {name} (there are: {known}); its "
            "experts are timed by a roofline"
        )
        return None
    return Surface(f"times of experts on {name}", [_expert(row) for row in rows], remark)


def dense_surface(compute: Compute, phase: int, remark: Remark) -> Surface | None:
    """Return the times of the dense part in *phase*, or None, as `expert_surface`."""
    name = _name(compute)
    if not compute.dense:
        return None
    rows = [row for row in compute.dense if row.phase == PHASES[phase]]
    if not rows:
        remark(f"no times of {PHASES[phase]} were measured on {name}; a roofline stands in")
        return None
    what = f"times of the dense part in {PHASES[phase]} on {name}"
    return Surface(what, [_dense(row) for row in rows], remark)


def _name(compute: Compute) -> str:
    return f"the processor of tier '{compute.tier}'"


def _expert(row: ExpertRow) -> tuple[int, int, int, int]:
    return row.nbytes, row.tokens, 0, row.time


def _dense(row: DenseRow) -> tuple[int, int, int, int]:
    return row.nbytes, row.tokens, row.context, row.time


def computed_experts(needed: Iterable[int], elsewhere: Iterable[int], n_parts: int) -> int:
    """Return how many experts have slices among *needed*, without those that have some *elsewhere*.

    All are slices of one layer.
    """
    left = {s // n_parts for s in elsewhere}
    return len({s // n_parts for s in needed} - left)
