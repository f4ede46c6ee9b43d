"""This module fills the cache with a profile's hottest slices before the run."""

from __future__ import annotations

from collections.abc import Sequence

from moetier.sim.policy.base import Warmup
from moetier.sim.policy.popularity import hottest
from moetier.sim.policy.seams import warmup


@warmup.register("static")
class Static(Warmup):
    """Start with the slices a profile trace used most, before prefill as well as before decode."""

    needs_popularity = True

    def initial(self) -> Sequence[int] | None:
        return hottest(self.context)

    def decode_begins(self) -> Sequence[int] | None:
        return hottest(self.context)
