"""This module is a machine of two tiers to plan for while the real one has not been measured."""

from __future__ import annotations

from collections.abc import Mapping

from moetier.sim.hardware import Profile

PLENTY = 10**12  # bytes


def stand_in(capacities: Mapping[str, int | None]) -> Profile:
    """Return a profile whose times mean nothing, with two tiers, the faster first.

    *capacities* are theirs in bytes; None where nobody knows, and then there is plenty.
    """
    fast, slow = capacities
    block = {"source": "to plan for"}
    tiers = {
        name: {"capacity": f"{PLENTY if n is None else n} B", "bandwidth": "1 GB/s", **block}
        for name, n in capacities.items()
    }
    return Profile.model_validate(
        {
            "name": "this-machine",
            **block,
            "tiers": tiers,
            "links": [{"src": slow, "dst": fast, "bandwidth": "1 GB/s", **block}],
            "compute": {"processor": {"tier": fast, "peak": "1 GOP/s", **block}},
        }
    )
