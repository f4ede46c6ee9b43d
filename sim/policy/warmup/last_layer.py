"""This module keeps what the last layer of prefill used."""

from __future__ import annotations

from collections.abc import Sequence

from moetier.sim.policy.base import Context, Warmup
from moetier.sim.policy.seams import warmup
from moetier.traces.batch import LayerBatch


@warmup.register("last-layer")
class LastLayer(Warmup):
    """Begin decode with the resident slices of the last MoE layer prefill ran."""

    def start(self, context: Context) -> None:
        super().start(context)
        self._last: Sequence[int] = ()

    def observe(self, batch: LayerBatch, needed: Sequence[int]) -> None:
        self._last = needed

    def decode_begins(self) -> Sequence[int] | None:
        nbytes, room, kept = self.context.layout.nbytes, self.context.capacity, []
        for s in reversed(self._last):  # a long prompt's layer may be larger than the cache
            if s in self.context.resident and nbytes[s] <= room:
                kept.append(s)
                room -= nbytes[s]
        return kept[::-1]
