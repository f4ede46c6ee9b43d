"""This module makes profiles wrong on purpose, to see whether a comparison would notice.

A comparison that passes says something only if it would fail for a simulation that is wrong. That
can be told of the measurements as they are: they are held against simulations of machines that this
one is not. Where repeats differ so much that even these pass, the comparison has no say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moetier.sim.hardware import Profile
from moetier.sim.throughput import Throughput


def twice_the_bandwidth(profile: Profile) -> Profile:
    """Return *profile* with every link twice as fast."""
    links = [
        link.model_copy(
            update={
                "bandwidth": Throughput(
                    tuple(
                        point.model_copy(update={"rate": 2 * point.rate})
                        for point in link.bandwidth.points
                    )
                )
            }
        )
        for link in profile.links
    ]
    return profile.model_copy(update={"links": links})


def no_contention(profile: Profile) -> Profile:
    """Return *profile* with compute that copies do not slow down."""
    if profile.contention is None or not profile.contention.compute_slowdown:
        return profile
    return profile.model_copy(update={"contention": None})


WRONG: Mapping[str, Callable[[Profile], Profile]] = {
    "bandwidth doubled": twice_the_bandwidth,
    "contention off": no_contention,
}
"""What a comparison may be asked to notice; a profile that stays the same says nothing."""
