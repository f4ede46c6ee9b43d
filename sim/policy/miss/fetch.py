"""This module fetches what is missing."""

from __future__ import annotations

from moetier.sim.policy.base import Miss
from moetier.sim.policy.seams import miss


@miss.register("fetch")
class Fetch(Miss):
    """Copy the missing slice up, and wait for it."""
