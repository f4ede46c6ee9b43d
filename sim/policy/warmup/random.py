"""This module fills the cache at random before decode: a control."""

from __future__ import annotations

from collections.abc import Sequence

from moetier.sim.policy.base import Warmup
from moetier.sim.policy.seams import warmup


@warmup.register("random")
class Random(Warmup):
    """Begin decode with slices drawn uniformly until the cache is full."""

    def decode_begins(self) -> Sequence[int] | None:
        nbytes = self.context.layout.nbytes
        room, chosen = self.context.capacity, []
        for s in self.context.rng.permutation(len(nbytes)).tolist():
            if nbytes[s] > room:
                break
            room -= nbytes[s]
            chosen.append(s)
        return chosen
