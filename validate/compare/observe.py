"""This module performs one run on either machine, and keeps what a comparison needs of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from moetier.sim.layout import Layout
from moetier.sim.machine.base import LayerTiming, Machine, OnSpan
from moetier.sim.machine.costs import Costs
from moetier.sim.machine.hierarchy import Hierarchy
from moetier.sim.plan import LayerPlan
from moetier.sim.records import Columns
from moetier.sim.run import MachineFactory, Result, Setting, TraceSource
from moetier.traces.columns import ColumnSource
from moetier.validate.compare.decisions import Decisions

Ints = npt.NDArray[np.int64]
Around = Callable[[MachineFactory], MachineFactory]


@dataclass(frozen=True)
class Case:
    """One point of a grid: what is run on both machines."""

    policy: str  # as tables name it
    capacity: Mapping[str, str]  # as tables show it, by tier
    source: TraceSource
    setting: Setting
    popularity: ColumnSource | None = None


class Run(Protocol):
    """Performs a case on a machine. *around* must be given the factory of that machine."""

    def __call__(self, case: Case, around: Around, **observers: Any) -> Result:
        """Return what `simulate` returns; *observers* are its arguments."""
        ...


@dataclass(frozen=True)
class Observed:
    """What a run did. `host_ns` and `beside` have an entry per row of `rows`."""

    result: Result
    decisions: Decisions
    rows: Columns
    host_ns: Ints  # between the end of the batch before and the machine's turn
    beside: npt.NDArray[np.bool_]  # was a prefetch queued or in flight when the batch began?


def observe(run: Run, case: Case, on_span: OnSpan | None = None) -> Observed:
    """Perform *case* with *run*; nothing is computed from what was seen until it has ended."""
    plans: list[LayerPlan] = []
    blocks: list[Columns] = []
    watch = _Watch()
    result = run(case, watch.around, on_plan=plans.append, sinks=[blocks.append], on_span=on_span)
    rows = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    return Observed(
        result=result,
        decisions=Decisions.of(plans),
        rows=rows,
        host_ns=np.array(watch.host_ns, np.int64),
        beside=np.array(watch.beside, np.bool_),
    )


def simulated_host_ns(observed: Observed) -> Ints:
    """Return the host time that the profile says, per row of *observed*."""
    stage = observed.result.stage
    per_layer = stage.hierarchy.main.host_time_per_layer * stage.costs.dense.model_layers
    found: Ints = per_layer[observed.rows["layer"]]
    return found


@dataclass
class _Watch:
    """Notes what records do not say, from outside a machine."""

    host_ns: list[int] = field(default_factory=list)
    beside: list[bool] = field(default_factory=list)

    def around(self, factory: MachineFactory) -> MachineFactory:
        """Return *factory* with every machine watched."""

        def make(
            hierarchy: Hierarchy, costs: Costs, layout: Layout, on_span: OnSpan | None = None
        ) -> Machine:
            return _Watched(factory(hierarchy, costs, layout, on_span), self)

        return make


class _Watched:
    """A machine with an eye on when it is called."""

    def __init__(self, machine: Machine, watch: _Watch) -> None:
        self._machine, self._watch = machine, watch
        self._left: int | None = None
        self.finish, self.landed = machine.finish, machine.landed
        self.queued_bytes = machine.queued_bytes

    def execute(self, plan: LayerPlan) -> LayerTiming:
        """Perform one batch."""
        entered = perf_counter_ns()
        self._watch.host_ns.append(0 if self._left is None else entered - self._left)
        self._watch.beside.append(self._machine.queued_bytes() > 0)
        timing = self._machine.execute(plan)
        self._left = perf_counter_ns()
        return timing

    def cancel(self, slices: Sequence[int]) -> list[int]:
        """Withdraw queued prefetches."""
        return self._machine.cancel(slices)
