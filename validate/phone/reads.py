"""This module is the simulated machine of a runtime that reads an expert matrix by matrix.

The planner keeps and evicts whole experts, as the runtime does; the link sees one transfer per
matrix (gate, up, down), all gates first, then all ups: the order in which the runtime queues them.
Each is aligned to pages at both ends, as O_DIRECT wants it, which adds a page on average. An
expert begins when all its matrices are there. The matrices count as equally large; that they differ
(q6_k for some `down`) is not in a trace.
"""

from __future__ import annotations

from typing import NamedTuple

from moetier.sim.layout import Layout
from moetier.sim.machine.base import LayerTiming, OnSpan
from moetier.sim.machine.costs import Costs
from moetier.sim.machine.hierarchy import Hierarchy
from moetier.sim.machine.simulated import SimMachine
from moetier.sim.plan import LayerPlan
from moetier.sim.units import ceil_div
from moetier.traces.batch import DECODE

READS = 3  # per expert: gate, up and down
PAGE = 4096  # bytes


class Token(NamedTuple):
    """What one decoded token took: ns, and the bytes it read.

    `lanes` adds up the busy time of the link's lanes, `copy` the times from the end of a dense part
    until the last slice had landed, `wait` the times in which compute stood still.
    """

    wall: int
    lanes: int
    copy: int
    wait: int
    nbytes: int


class ReadMachine(SimMachine):
    """A simulated machine for demand fetching that moves *reads* transfers per missing expert."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        costs: Costs,
        layout: Layout,
        on_span: OnSpan | None = None,
        reads: int = READS,
    ) -> None:
        """Take the *layout* of whole experts, as the planner knows them, and their *costs*."""
        parts = in_reads(layout, reads)
        super().__init__(
            hierarchy, Costs(hierarchy, costs.dense, parts, costs.expert_ops), parts, on_span
        )
        self._reads, self._parts = range(reads), parts
        self.tokens: list[Token] = []
        """One entry per decode step so far."""
        self._step = -1

    def execute(self, plan: LayerPlan) -> LayerTiming:
        """Perform one batch; *plan* has whole experts."""
        if plan.prefetch or plan.cpu:
            raise ValueError(
                "this machine fetches on demand only; drop prefetching and `miss: cpu`"
            )
        n, busy = len(self._reads), sum(self.fabric.busy())
        needed = [s * n + part for s in plan.needed for part in self._reads]
        missing = [s * n + part for part in self._reads for s in plan.missing]
        timing = super().execute(LayerPlan(plan.batch, needed, missing))
        if plan.batch.phase == DECODE:
            took = Token(
                timing.end - timing.start,
                sum(self.fabric.busy()) - busy,
                timing.copy,
                timing.wait,
                self._parts.size(missing),
            )
            if plan.batch.step == self._step:
                took = Token(*map(sum, zip(self.tokens.pop(), took, strict=True)))
            self._step = plan.batch.step
            self.tokens.append(took)
        return timing


def in_reads(layout: Layout, reads: int) -> Layout:
    """Return *layout*, whose slices are whole experts, with *reads* parts per expert."""
    firsts = layout.nbytes[:: layout.layer_slices]
    sizes = [[ceil_div(size, reads) + PAGE] * reads for size in firsts]
    return Layout(sizes, layout.n_experts)
