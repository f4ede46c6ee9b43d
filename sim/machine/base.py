"""This module is the contract of a machine: it interprets plans, and says when things happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from moetier.sim.plan import LayerPlan
from moetier.sim.policy.base import Lateness


class LayerTiming(NamedTuple):
    """When one batch happened, in nanoseconds.

    The batch runs from `start` to `end`: the dense part, then the wait for what is needed, then the
    experts. `copy` is the time from the end of the dense part until the last demanded slice landed.
    """

    start: int
    dense: int
    wait: int  # compute waits: for copies, and for a slower processor at the end
    copy: int
    experts: int
    end: int
    late: int  # needed slices that a prefetch had under way but not landed
    dropped: int = 0  # bytes of queued prefetches that left the plan before they started


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that occupied a lane of the timeline, for observers."""

    lane: str
    name: str
    start: int
    end: int
    info: Mapping[str, object] = field(default_factory=dict)


OnSpan = Callable[[Span], None]


class Machine(Lateness, Protocol):
    """Performs plans one after the other, in virtual or in real time."""

    def execute(self, plan: LayerPlan) -> LayerTiming:
        """Perform one batch and return when its parts happened."""
        ...

    def finish(self) -> int:
        """Let what is still in flight land; return the time at which everything is quiet, in ns."""
        ...
