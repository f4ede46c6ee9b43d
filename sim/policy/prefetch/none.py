"""This module brings nothing early."""

from __future__ import annotations

from moetier.sim.policy.base import Prefetch
from moetier.sim.policy.seams import prefetch


@prefetch.register("none")
class Nothing(Prefetch):
    """Fetch on demand only."""
