"""This module gives a link's total throughput by transfer size and number of busy lanes."""

from __future__ import annotations

from bisect import bisect_right
from fractions import Fraction
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    TypeAdapter,
)

from moetier.sim.units import Bytes, Percent, Rate, parse_rate


def above_zero(value: int) -> int:
    """Return *value*; raise `ValueError` when it is zero."""
    if value <= 0:
        raise ValueError(f"must be above zero, got {value}")
    return value


PositiveBytes = Annotated[Bytes, AfterValidator(above_zero)]
PositiveRate = Annotated[Rate, AfterValidator(above_zero)]


class Point(BaseModel):
    """One measurement: the total *rate* with *lanes* busy, each moving *size* bytes at a time.

    Where it was repeated, *spread* is the interquartile range of the repeats over their median.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: PositiveBytes
    lanes: int = Field(default=1, ge=1)
    rate: PositiveRate
    repeats: int | None = Field(default=None, ge=1)
    spread: Percent | None = None


class Throughput:
    """Total throughput in bytes per second, interpolated between measured *points*.

    Between two sizes it is linear in log2(size), between two lane counts linear in their number;
    beyond the ends it stays at the end. One point is a constant. The arithmetic is exact, so a
    measured point is met exactly and results are the same on every machine.
    """

    row = Point

    def __init__(self, points: tuple[Point, ...]) -> None:
        """Take the *points*; raise `ValueError` for none, or for two at one size and lane count."""
        if not points:
            raise ValueError("a table needs at least one row of size, lanes and rate")
        self.points = points
        curves: dict[int, dict[int, int]] = {}
        for point in points:
            curve = curves.setdefault(point.lanes, {})
            if point.size in curve:
                raise ValueError(f"two rows for {point.size} B with {point.lanes} lanes; keep one")
            curve[point.size] = point.rate
        self._curves = {
            lanes: [(_log2(size), Fraction(rate)) for size, rate in sorted(curves[lanes].items())]
            for lanes in sorted(curves)
        }
        self._memo: dict[tuple[int, int], Fraction] = {}

    @property
    def peak(self) -> int:
        """Return the highest rate among the points, in bytes per second."""
        return max(point.rate for point in self.points)

    def total(self, nbytes: int, active: int) -> Fraction:
        """Return bytes per second, all lanes together, with *active* lanes each moving *nbytes*."""
        key = (nbytes, active)
        if key not in self._memo:
            size = _log2(nbytes)
            rates = [(lanes, _between(curve, size)) for lanes, curve in self._curves.items()]
            self._memo[key] = _between(rates, active)
        return self._memo[key]

    def __eq__(self, other: object) -> bool:
        """Compare the points, in their order."""
        return isinstance(other, Throughput) and self.points == other.points

    def __hash__(self) -> int:
        """Hash the points."""
        return hash(self.points)

    def __repr__(self) -> str:
        """Show how many points there are and the highest rate."""
        return f"Throughput({len(self.points)} points, peak {self.peak} B/s)"


def _between(points: list[tuple[int, Fraction]], at: int) -> Fraction:
    """Interpolate linearly in ascending *points* (x, y); beyond the ends y is the end's."""
    upper = bisect_right(points, at, key=lambda point: point[0])
    if upper == 0 or upper == len(points):
        return points[max(upper - 1, 0)][1]
    (x0, y0), (x1, y1) = points[upper - 1 : upper + 1]
    return y0 + (y1 - y0) * Fraction(at - x0, x1 - x0)


_LOG_BITS = 40  # fine enough that one byte more in 4 GiB is seen, so time never falls with size


def _log2(n: int) -> int:
    """Return log2(*n*) times 2**40, rounded down, by squaring: no float, so no platform."""
    whole = max(n, 1).bit_length() - 1
    mantissa, result = (max(n, 1) << 128) >> whole, whole
    for _ in range(_LOG_BITS):
        mantissa = (mantissa * mantissa) >> 128
        bit = mantissa >> 129
        mantissa >>= bit
        result = result << 1 | bit
    return result


_TABLE = TypeAdapter(tuple[Point, ...])


def _read(value: Any) -> Throughput:
    if isinstance(value, Throughput):
        return value
    if isinstance(value, list | tuple):
        return Throughput(_TABLE.validate_python(value))
    return constant(above_zero(parse_rate(value)))


def _write(throughput: Throughput) -> Any:
    rows = _TABLE.dump_python(throughput.points, mode="json", exclude_none=True)
    return rows[0]["rate"] if len(rows) == 1 else rows


def constant(bytes_per_s: int) -> Throughput:
    """Return the throughput of a link that moves *bytes_per_s* whatever the size and the lanes."""
    return Throughput((Point.model_construct(size=1, lanes=1, rate=bytes_per_s),))


# In a schema: a rate such as "25 GB/s", or a list of rows {size, lanes, rate}.
ThroughputField = Annotated[
    Throughput, BeforeValidator(_read), PlainSerializer(_write, when_used="json")
]
