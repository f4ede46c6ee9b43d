"""This module describes measured compute times, which stand in a profile for the roofline.

A row is one measurement. Experts are timed one by one, by the kernel that computes them; the dense
part is timed layer by layer. What is fixed per batch of experts is not in their rows: it is the
`overhead` of the processor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from moetier.sim.throughput import PositiveBytes, above_zero
from moetier.sim.units import Percent, Time

PositiveTime = Annotated[Time, AfterValidator(above_zero)]


class ExpertRow(BaseModel):
    """The *time* of one expert whose weights take *nbytes*, on *tokens* tokens, by *kernel*."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel: str = Field(min_length=1)  # such as `whole` or `codes-4`
    nbytes: PositiveBytes
    tokens: int = Field(ge=1)
    time: PositiveTime
    repeats: int | None = Field(default=None, ge=1)  # that the time is the median of
    spread: Percent | None = None  # of the repeats: interquartile range over median

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Return what was measured."""
        return self.kernel, self.nbytes, self.tokens


class DenseRow(BaseModel):
    """The *time* of one layer's dense part, whose weights take *nbytes*.

    *context* counts key/value entries as a batch does: summed over its *tokens*.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    phase: Literal["decode", "prefill"] = "decode"  # of the batch
    nbytes: PositiveBytes
    tokens: int = Field(default=1, ge=1)
    context: int = Field(default=0, ge=0)
    time: PositiveTime
    repeats: int | None = Field(default=None, ge=1)  # that the time is the median of
    spread: Percent | None = None  # of the repeats: interquartile range over median

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Return what was measured."""
        return self.phase, self.nbytes, self.tokens, self.context


Row = TypeVar("Row", ExpertRow, DenseRow)


def once_each(rows: Sequence[Row]) -> Sequence[Row]:
    """Return *rows*; raise `ValueError` where two are of one thing."""
    for key, times in Counter(row.key for row in rows).items():
        if times > 1:
            named = ", ".join(str(part) for part in key)
            raise ValueError(f"{times} rows for ({named}); keep one")
    return rows


ExpertRows = Annotated[tuple[ExpertRow, ...], AfterValidator(once_each)]
DenseRows = Annotated[tuple[DenseRow, ...], AfterValidator(once_each)]
