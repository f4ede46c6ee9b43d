"""This module begins decode with the experts that prefill used most."""

from __future__ import annotations

from collections.abc import Sequence

from moetier.sim.layout import LSB
from moetier.sim.policy.base import Context, Warmup
from moetier.sim.policy.seams import warmup
from moetier.traces.batch import LayerBatch


@warmup.register("pcw")
class PredictiveCacheWarmup(Warmup):
    """Order what prefill left by how many of its tokens used each expert, the hottest last to go.

    After SliceMoE (arXiv 2512.12990). What does not fit goes: LSB slices first, then the MSB slices
    of experts that few tokens used. With *fill* what prefill used and the cache has lost comes back
    as long as there is room: it is what an eviction by count during prefill would have kept, so its
    copy is not charged.
    """

    def __init__(self, fill: bool = False) -> None:
        self.fill = fill

    def start(self, context: Context) -> None:
        super().start(context)
        layout = context.layout
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
        return kept[::-1]
