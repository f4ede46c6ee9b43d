"""This module lets decode begin with nothing."""

from __future__ import annotations

from collections.abc import Sequence

from moetier.sim.policy.base import Warmup
from moetier.sim.policy.seams import warmup


@warmup.register("empty")
class Empty(Warmup):
    """Begin decode with an empty cache, whatever prefill left: the cold control."""

    def decode_begins(self) -> Sequence[int] | None:
        return ()
