"""This module leaves the cache as prefill left it."""

from __future__ import annotations

from moetier.sim.policy.base import Warmup
from moetier.sim.policy.seams import warmup


@warmup.register("none")
class Untouched(Warmup):
    """Start empty and leave what prefill brought."""
