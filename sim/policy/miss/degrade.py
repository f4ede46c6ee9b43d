"""This module computes an expert whose LSB slice is missing from its MSB slice alone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from fractions import Fraction
from typing import Literal

from moetier.sim.layout import LSB
from moetier.sim.policy.base import Miss, Missed
from moetier.sim.policy.seams import miss
from moetier.sim.units import parse_share
from moetier.traces.batch import DECODE, LayerBatch
from moetier.traces.errors import InputError
from moetier.traces.registry import Natural


@miss.register("degrade")
class Degrade(Miss):
    """Do without a missing LSB slice in decode; fetch MSB slices, and all that prefill misses.

    With a *miss_rate* such as 0.05 or "5 %" an LSB slice is done without only where fetching it
    would bring the share of look-ups (*per* byte: of their bytes) that were fetched above that. The
    first *after* decode steps fetch all they miss and do not count. MSB slices alone may exceed the
    share; then no LSB slice is fetched until it is kept again.
    """

    alters_output = True
    needs_bit_slices = True

    def __init__(
        self,
        miss_rate: float | str | None = None,
        after: Natural = 10,
        per: Literal["lookup", "byte"] = "lookup",
    ) -> None:
        self.miss_rate = None if miss_rate is None else _share(miss_rate)
        self.after, self.per = after, per
        self.counts_demand, self.uncounted_steps = miss_rate is not None, after

    def resolve(self, missing: list[int], batch: LayerBatch) -> Missed:
        if batch.phase != DECODE:
            return Missed(missing)
        if self.miss_rate is None:
            fetch = [s for s in missing if not s & LSB]
            return Missed(fetch, degrade=[s for s in missing if s & LSB])
        if self.context.progress.decode_steps <= self.after:
            return Missed(missing)
        progress = self.context.progress
        size: Callable[[Collection[int]], int] = self.context.layout.size
        lookups, lookup_bytes, fetches, fetch_bytes = progress.uncounted
        if self.per == "lookup":
            asked, spent = progress.lookups - lookups, progress.fetches - fetches
            size = len
        else:
            asked, spent = progress.lookup_bytes - lookup_bytes, progress.fetch_bytes - fetch_bytes
        room = asked * self.miss_rate.numerator // self.miss_rate.denominator - spent
        fetch = [s for s in missing if not s & LSB]
        degrade: list[int] = []
        room -= size(fetch)
        for s in missing:
            if s & LSB:
                room -= size((s,))
                (fetch if room >= 0 else degrade).append(s)
        return Missed(fetch, degrade=degrade)


def _share(value: float | str) -> Fraction:
    """Return a share such as "5 %" or 0.05 exactly; raise `InputError` outside 0 to 1."""
    if isinstance(value, str):
        return parse_share(value)
    if not 0 <= value <= 1:
        raise InputError(
            f"miss 'degrade': miss_rate is {value}", way_out='use 0 to 1, or a text such as "5 %"'
        )
    return Fraction(str(value))
