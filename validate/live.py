"""This module joins a running model to a planner, a machine and a recorder.

It is the loop of `sim.run.drive` turned inside out: the model pushes each batch, and what the plan
says is what the model computes. Where the plan leaves the batch as it was, the model's own tensors
go on untouched, so that a lossless policy changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from moetier.sim.layout import Layout
from moetier.sim.machine.base import Machine, OnSpan
from moetier.sim.machine.simulated import SimMachine
from moetier.sim.metrics import Metrics
from moetier.sim.plan import LayerPlan
from moetier.sim.planner import OnPlan
from moetier.sim.records import OnColumns, Recorder
from moetier.sim.run import MachineFactory, Setting, Stage, count
from moetier.traces.batch import Floats, LayerBatch
from moetier.traces.columns import ColumnSource
from moetier.traces.errors import InputError
from moetier.traces.live import Choice
from moetier.validate.live_precision import check_precision

T = TypeVar("T")


class Driver:
    """A stage in use by a model: decides each batch, lets virtual time pass, keeps the record."""

    def __init__(
        self,
        stage: Stage,
        setting: Setting,
        *,
        sinks: Sequence[OnColumns] = (),
        on_plan: OnPlan | None = None,
        on_span: OnSpan | None = None,
        popularity: ColumnSource | None = None,
        machine: MachineFactory = SimMachine,
    ) -> None:
        """Begin with an idle machine and empty caches; the arguments are those of `simulate`."""
        check_precision(stage.policy.precision)
        self.metrics = Metrics(setting.warmup_steps)
        self.recording, self.elapsed_ns = True, 0
        heard = None if on_span is None else self._while_recording(on_span)
        self.machine: Machine = machine(stage.hierarchy, stage.costs, stage.layout, heard)
        self._recorder = Recorder(stage.layout, stage.energy, [self.metrics, *sinks])
        self._planner = stage.planner(
            setting,
            popularity=count(popularity, stage.layout) if popularity is not None else None,
            lateness=self.machine,
            on_plan=None if on_plan is None else self._while_recording(on_plan),
        )
        self._layout = stage.layout
        self._renormalise = stage.policy.miss.renormalise
        self._levels = stage.policy.precision.levels

    def decide(self, batch: LayerBatch) -> Choice | None:
        """Plan and perform *batch*; return what the model shall compute, None for what it would."""
        plan = self._planner.step(batch)
        timing = self.machine.execute(plan)
        if self.recording:
            self._recorder.add(plan, timing)
        return self._choice(batch, plan)

    def finish(self) -> None:
        """End the record: hand it on, let copies land, and note when all was quiet.

        What comes after still moves caches and time, and nobody hears of it.
        """
        self._recorder.flush()
        self.elapsed_ns = self.machine.finish()
        self.recording = False

    def _choice(self, batch: LayerBatch, plan: LayerPlan) -> Choice | None:
        """Return what *plan* makes of *batch*; None where it leaves it as it was."""
        levels = self._levels(plan.batch, plan.degrade)
        if plan.batch is batch and not plan.skip and levels is None:
            return None
        return chosen(plan, self._layout, levels, renormalise=self._renormalise)

    def _while_recording(self, hear: Callable[[T], None]) -> Callable[[T], None]:
        def tell(what: T) -> None:
            if self.recording:
                hear(what)

        return tell


def chosen(
    plan: LayerPlan, layout: Layout, levels: list[int] | None = None, *, renormalise: bool
) -> Choice:
    """Return what *plan* computes: the routed experts, those skipped at weight 0.

    Expert *e* computed at level *v* of *levels* has the id `v * n_experts + e`, as
    `live_precision.computed_at` lays the experts out.

    With *renormalise* the weights of what is left of a token are scaled up to their old sum; a
    token that is left nothing gets nothing.
    """
    batch = plan.batch
    if batch.weights is None:
        raise InputError(
            f"the routing of layer {batch.layer} came back without weights",
            where="policy.routing",
            way_out="use a policy that says how experts are weighed",
        )
    tokens = batch.token_ids()
    weights = batch.weights
    if plan.skip:
        gone = {layout.expert_of(s) for s in plan.skip}
        kept = np.array([expert not in gone for expert in batch.experts])
        weights = np.where(kept, weights, np.float32(0))
        if renormalise:
            weights = _renormalised(weights, batch.weights, tokens, batch.n_tokens)
    experts: Sequence[int] = batch.experts
    if levels is not None:
        n = layout.n_experts
        experts = [e + n * level for e, level in zip(experts, levels, strict=True)]
    return Choice(tokens, experts, weights)


def _renormalised(weights: Floats, before: Floats, tokens: list[int], n_tokens: int) -> Floats:
    """Return *weights* scaled up token by token to the sum they had *before*."""
    old = np.bincount(tokens, before, n_tokens)
    new = np.bincount(tokens, weights, n_tokens)
    scale = np.divide(old, new, out=np.ones(n_tokens), where=new != 0)
    result: Floats = (weights * scale[tokens]).astype(np.float32)
    return result
