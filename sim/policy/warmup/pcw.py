"""This module begins decode with the experts that prefill used most."""

from __future__ import annotations

from collections.abc import Sequence

from moetier.sim.layout import LSB
from moetier.sim.policy.base import Context, Warmup
from moetier.sim.policy.seams import warmup
from moetier.traces.batch import LayerBatch


@warmup.register("pcw")
class PredictiveCacheWarmup(Warmup):
    """Begin decode with what prefill used most, the hottest last to go.

    After SliceMoE (arXiv 2512.12990), which evicts by count during prefill: LSB slices first, then
    the MSB slices of experts that few tokens used. A layer's counts are final once its batch has
    run, so what that leaves is just the hottest of all that was there or was fetched, which is what
    this part makes resident. Its copies were charged to prefill, so they are not charged again.
    With *fill* off only what the run's own eviction left is put in that order.
    """

    def __init__(self, fill: bool = True) -> None:
        self.fill = fill

    def start(self, context: Context) -> None:
        super().start(context)
        self._begin()

    def _begin(self) -> None:
        """Forget the counts: the next prefill has its own."""
        layout = self.context.layout
        self._tokens = [0] * (layout.n_layers * layout.n_experts)  # per expert
        self._used: set[int] = set()

    def observe(self, batch: LayerBatch, needed: Sequence[int]) -> None:
        first, tokens = batch.layer * self.context.layout.n_experts, self._tokens
        for expert in batch.experts:
            tokens[first + expert] += 1
        self._used.update(needed)

    def decode_begins(self) -> Sequence[int] | None:
        layout, tokens, room = self.context.layout, self._tokens, self.context.capacity
        there = self._used.union(self.context.resident) if self.fill else self.context.resident
        parts, low = layout.n_parts, LSB if layout.bit_sliced else 0
        kept = []
        for s in sorted(there, key=lambda s: (s & low, -tokens[s // parts], s)):
            if layout.nbytes[s] <= room:
                kept.append(s)
                room -= layout.nbytes[s]
        self._begin()
        return kept[::-1]
