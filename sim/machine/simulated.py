"""This module performs plans in virtual time: integer nanoseconds, no clock, no randomness.

Compute runs one batch after the other; the links are a `Fabric`, brought up to date when something
happens to it. `machine.processes` states the same rules as SimPy processes, one event at a time;
both give the same records, which is a test.
"""

from __future__ import annotations

from collections.abc import Sequence

from moetier.sim.layout import Layout
from moetier.sim.machine.base import LayerTiming, OnSpan, Span
from moetier.sim.machine.costs import Costs
from moetier.sim.machine.fabric import Fabric, Links
from moetier.sim.machine.hierarchy import Hierarchy
from moetier.sim.machine.one_lane import OneLane
from moetier.sim.plan import LayerPlan


class SimMachine:
    """One machine's tiers, links and compute, from time 0 on."""

    def __init__(
        self, hierarchy: Hierarchy, costs: Costs, layout: Layout, on_span: OnSpan | None = None
    ) -> None:
        """Begin idle; *on_span* hears of everything that occupies compute or a link."""
        self.now = 0
        self._on_span, self._fast = on_span, hierarchy.names[0]
        self._dense_ns, self._expert_ns = costs.dense_ns, costs.expert_ns
        one_lane = len(hierarchy.links) == 1 and hierarchy.links[0].lanes == 1
        self.fabric: Fabric = (
            OneLane(hierarchy.links[0], layout)
            if one_lane and on_span is None
            else Links(hierarchy, layout, on_span)
        )
        self._move = self.fabric.move

    def execute(self, plan: LayerPlan) -> LayerTiming:
        """Perform one batch and return when its parts happened."""
        start = self.now
        dense = self._dense_ns(plan.batch)
        asked = start + dense
        dropped = self.fabric.drop(plan.replaced, start) if plan.replaced else 0
        landed, copied, cpu_ready, late = self._move(plan, asked)
        experts, cpu = self._expert_ns(plan)
        end = landed + experts
        if plan.cpu:
            end = max(end, cpu_ready + cpu)
        if plan.evicted:
            dropped += self.fabric.drop(plan.evicted, end)
        if plan.demoted:
            self.fabric.demote(plan.demoted, end)
        if self._on_span is not None:
            self._show(
                self._on_span, plan, (start, asked, landed, landed + experts), cpu_ready, cpu
            )
        self.now = end
        return LayerTiming(
            start, dense, end - asked - experts, copied - asked, experts, end, late, dropped
        )

    def finish(self) -> int:
        """Let what is in flight or queued land; return the time at which all is quiet, in ns."""
        return max(self.now, self.fabric.finish())

    def landed(self, slice_id: int) -> bool:
        """Return whether a planned-resident slice has arrived in the fastest tier."""
        return self.fabric.landed(slice_id, self.now)

    def queued_bytes(self) -> int:
        """Return the bytes of prefetches that are queued or in flight towards the fastest tier."""
        return self.fabric.queued_bytes(self.now)

    def cancel(self, slices: Sequence[int]) -> list[int]:
        """Withdraw the queued prefetches among *slices*; return those that had not started."""
        return self.fabric.cancel(slices, self.now)

    def _show(
        self,
        on_span: OnSpan,
        plan: LayerPlan,
        edges: tuple[int, int, int, int],
        cpu_ready: int,
        cpu: int,
    ) -> None:
        """Tell the observer what compute did in one batch, and how full the fastest tier is.

        *edges* are the times at which the dense part, the wait and the experts begin and end.
        """
        where = {"step": plan.batch.step, "layer": plan.batch.layer}
        start, asked, landed, computed = edges
        spans = [
            ("compute", "dense", start, asked),
            ("compute", "wait", asked, landed),
            ("compute", "experts", landed, computed),
            ("cpu", "experts", cpu_ready, cpu_ready + cpu),
        ]
        for lane, name, begin, end in spans:
            if end > begin:
                on_span(Span(lane, name, begin, end, where))
        level = {"bytes": plan.resident}
        on_span(Span(f"resident in {self._fast}", "bytes", landed, landed, level))
