"""This module uses every expert whole, as it is stored."""

from __future__ import annotations

from moetier.sim.policy.base import Precision
from moetier.sim.policy.seams import precision


@precision.register("full")
class Full(Precision):
    """Use every expert whole, in the stored format."""
