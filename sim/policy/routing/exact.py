"""This module runs the experts the router chose."""

from __future__ import annotations

from moetier.sim.policy.base import Routing
from moetier.sim.policy.seams import routing


@routing.register("exact")
class Exact(Routing):
    """Run exactly the experts the model's router chose, with its weights."""
