"""This module keeps two copies of every expert, and reads the small one where it matters less."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from moetier.sim.layout import Layout
from moetier.sim.policy.base import Context, ExpertFormat, Precision
from moetier.sim.policy.precision.bit_sliced import weights_of
from moetier.sim.policy.precision.uniform import check_bits, quantised_bytes
from moetier.sim.policy.seams import precision
from moetier.traces.batch import DECODE, Floats, LayerBatch
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.traces.registry import Positive, Share

HIGH, LOW = 0, 1  # the parts of an expert, and the formats it is computed in


@precision.register("hobbit")
class Hobbit(Precision):
    """Read, in decode, experts at high or low precision, or not at all, by what outweighs them.

    A token's experts are sorted by gate weight. What stands before one, as a share of the token's
    weights, is its unimportance: up to *t1* it is computed at high precision, up to *t2* at low
    precision, beyond not at all, so the first one always is at high precision (HOBBIT, arXiv
    2411.01433). The weights of the others stay as they are. Prefill computes all at high precision:
    some token of a prompt wants nearly every expert so.

    The copies are independent, each a slice with its own hits and misses: the high one as stored,
    or in codes of *high* bits; the low one in codes of *low* bits, in groups of *group*. A batch
    uses one copy of an expert, the high one if any of its tokens wants that. With *upgrade* an
    expert wanted at low precision is computed from its high copy where that is cached: no byte is
    moved for it, but it is younger then. Which of the two HOBBIT does, our sources do not say.
    """

    alters_output = True
    needs_weights = True
    kernel = "hobbit"

    def __init__(
        self,
        t1: Share = 0.6,
        t2: Share = 0.9,
        low: Positive = 4,
        high: Positive | None = None,
        group: Positive = 32,
        upgrade: bool = False,
    ) -> None:
        if t1 > t2:
            raise InputError(
                f"precision 'hobbit': t1 is {t1}, above t2, {t2}", way_out="use t1 <= t2"
            )
        if high is not None and low >= high:
            raise InputError(
                f"precision 'hobbit': low is {low} bits, high {high}", way_out="use fewer for low"
            )
        self.t1, self.t2 = np.float32(t1), np.float32(t2)  # as weights are: 0.6 is not above 0.6
        self.low, self.high, self.group = low, high, group
        self.upgrade = self.follows_cache = upgrade
        stored = ExpertFormat() if high is None else ExpertFormat(high, group=group)
        self.formats = (stored, ExpertFormat(low, group=group))

    def start(self, context: Context) -> None:
        super().start(context)
        self._narrowed: LayerBatch | None = None
        self._at_low: set[int] = set()  # experts of the batch `_narrowed`

    def layout(self, expert_bytes: Sequence[int], geometry: Geometry) -> Layout:
        small = quantised_bytes(geometry, self.low, self.group)
        high = self.high and quantised_bytes(geometry, self.high, self.group)
        large = [high or stored for stored in expert_bytes]
        if self.high is not None:
            check_bits("hobbit", self.high, expert_bytes, geometry)
        if small >= min(large):
            raise InputError(
                f"precision 'hobbit': a low copy of {small} bytes, with its scales, beside a high "
                f"one of {min(large)}",
                way_out="use fewer bits for `low`, or `weights: bf16`",
            )
        return Layout([[size, small] for size in large], geometry.n_experts)

    def narrow(self, batch: LayerBatch) -> LayerBatch:
        self._narrowed, self._at_low = batch, set()
        if batch.phase != DECODE:
            return batch
        before = unimportance(batch)
        wanted = {e for e, high in zip(batch.experts, before <= self.t1, strict=True) if high}
        found = self._narrowed = _kept(batch, before <= self.t2)
        self._at_low = set(found.experts) - wanted
        if self.upgrade:
            slice_id, resident = self.context.layout.slice_id, self.context.resident
            self._at_low = {
                e for e in self._at_low if slice_id(batch.layer, e, HIGH) not in resident
            }
        return found

    def needed(self, batch: LayerBatch) -> list[int]:
        base, levels = batch.layer * self.context.layout.layer_slices, self._levels(batch)
        return [base + 2 * e + level for e, level in zip(batch.experts, levels, strict=True)]

    def levels(self, batch: LayerBatch, degraded: Collection[int]) -> list[int] | None:
        found = self._levels(batch)
        return found if LOW in found else None

    def _levels(self, batch: LayerBatch) -> list[int]:
        if batch is not self._narrowed:
            raise RuntimeError("what a batch needs is known only after `narrow` has seen it")
        return [LOW if e in self._at_low else HIGH for e in batch.experts]


def unimportance(batch: LayerBatch) -> Floats:
    """Return, per entry of *batch*, what share of its token's gate weights stands before it.

    Before it stand the entries of larger weight, and those of equal weight that come first.
    """
    weights, tokens = weights_of(batch).astype(np.float64), np.array(batch.token_ids())
    order = np.lexsort((-weights, tokens))
    before = np.cumsum(weights[order]) - weights[order]
    first = np.searchsorted(tokens[order], tokens[order])  # of each entry's token
    total = np.bincount(tokens, weights, batch.n_tokens)[tokens[order]]
    share = np.divide(before - before[first], total, out=np.zeros_like(total), where=total > 0)
    found = np.empty(len(order), np.float32)
    found[order] = share
    return found


def _kept(batch: LayerBatch, keep: npt.NDArray[np.bool_]) -> LayerBatch:
    """Return *batch* without the entries that are not to *keep*."""
    if keep.all():
        return batch
    at = np.flatnonzero(keep).tolist()
    tokens, recorded = batch.token_ids(), batch.recorded
    return replace(
        batch,
        experts=[batch.experts[i] for i in at],
        weights=weights_of(batch)[at],
        tokens=[tokens[i] for i in at],
        recorded=recorded and [recorded[i] for i in at],
    )
