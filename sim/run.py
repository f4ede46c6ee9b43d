"""This module runs one policy over one source on one machine, from inputs to metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Protocol

import numpy as np

from moetier.sim import memory
from moetier.sim.energy import Energy
from moetier.sim.future import Future
from moetier.sim.hardware import Profile
from moetier.sim.layout import Layout
from moetier.sim.machine.base import Machine, OnSpan
from moetier.sim.machine.costs import Costs
from moetier.sim.machine.estimates import ProfileEstimates
from moetier.sim.machine.hierarchy import Hierarchy, build_hierarchy
from moetier.sim.machine.simulated import SimMachine
from moetier.sim.machine.work import dense_work, with_predictors
from moetier.sim.metrics import Metrics
from moetier.sim.planner import OnPlan, Planner
from moetier.sim.policy.base import Context
from moetier.sim.policy.compose import Policy, compose
from moetier.sim.policy.fit import check_fit
from moetier.sim.records import OnColumns, Recorder
from moetier.sim.warnings import limitations, warnings_of
from moetier.traces.batch import LayerBatch, Source
from moetier.traces.columns import PAD, ColumnSource
from moetier.traces.errors import InputError
from moetier.traces.formats import stored_expert_bytes
from moetier.traces.gating import GateRule
from moetier.traces.schema import Header, Predictor

MachineFactory = Callable[[Hierarchy, Costs, Layout, OnSpan | None], Machine]


@dataclass(frozen=True)
class Setting:
    """Everything that decides a run's outcome, beside the routing itself.

    *capacity* maps a cached tier to bytes, or to a share of all routed-expert bytes at the stored
    format; a tier it does not name gets what is left beside the dense part.
    """

    profile: Profile
    policy: str | Mapping[str, Any] = "on-demand"
    capacity: Mapping[str, int | Fraction] = field(default_factory=dict)
    weights: str | None = None  # default: what the trace records, else bf16
    tiers: list[str] | None = None  # default: from the main processor's tier down
    exclusive: bool = False
    overlap: bool = False  # an expert begins when its own slices are there
    seed: int = 0
    warmup_steps: int = 0  # decode steps left out of rates and means
    kv_bytes: int = 2  # of one number of the key/value cache


@dataclass(frozen=True)
class Stage:
    """A setting with everything derived from it, ready to be stepped through."""

    hierarchy: Hierarchy
    policy: Policy
    layout: Layout
    costs: Costs
    energy: Energy
    capacities: list[int]  # bytes, per cached tier
    budget: memory.Budget
    weights: str
    expert_ops: int  # operations of one expert on one token; 0 where unknown
    gate: GateRule
    estimates: ProfileEstimates

    def planner(self, setting: Setting, **given: Any) -> Planner:
        """Return a planner for this stage; *given* is what only the run knows, as its arguments."""
        return Planner(
            self.policy,
            self.layout,
            self.capacities,
            exclusive=setting.exclusive,
            seed=setting.seed,
            gate=self.gate,
            estimates=self.estimates,
            **given,
        )


@dataclass(frozen=True)
class Result:
    """What a run says: metrics by name, warnings about the outcome, and what it assumed."""

    metrics: dict[str, Any]
    warnings: list[str]
    known_limitations: list[str]
    elapsed_ns: int
    stage: Stage


def set_up(
    header: Header, setting: Setting, extent: memory.Extent, has_future: bool = True
) -> Stage:
    """Check *setting* against a model's *header* and derive what a run needs.

    Raises:
        InputError: If the parts do not fit together, naming the key, the value and the way out.
    """
    geometry = header.geometry
    hierarchy = build_hierarchy(setting.profile, setting.tiers, setting.exclusive, setting.overlap)
    policy = compose(setting.policy, hierarchy.cached)
    if policy.needs_future and not has_future:
        raise InputError(
            f"'{policy.name}' is an oracle: it needs the future, which a live model does not have",
            where="policy",
            way_out="use it on a trace",
        )
    if policy.miss.computes_below and hierarchy.cpu is None:
        raise InputError(
            f"nothing computes from tier '{hierarchy.names[1]}' of '{setting.profile.name}'",
            where="policy.miss",
            way_out="use `miss: fetch`, or give the profile a processor there",
        )
    predictors = find_predictors(policy, header.predictors)
    weights, whole = stored_expert_bytes(header, setting.weights)
    layout = policy.precision.layout(whole, geometry)
    work = dense_work(header, weights, setting.kv_bytes)
    if predictors:
        work = with_predictors(work, header, predictors, policy.routing.replaces_router)
    sized = geometry.hidden is not None and geometry.moe_intermediate is not None
    expert_ops = 2 * geometry.expert_weights if sized else 0
    predictor_bytes = sum(item.nbytes or 0 for item in predictors)
    check_fit(policy, layout, header)
    budget = memory.budget(
        hierarchy,
        work,
        header,
        weights,
        extent,
        predictor_bytes,
        policy.precision.beside(geometry),
    )
    costs = Costs(hierarchy, work, layout, expert_ops, kernel=policy.precision.kernel)
    return Stage(
        hierarchy=hierarchy,
        policy=policy,
        layout=layout,
        costs=costs,
        energy=Energy(hierarchy, work, expert_ops),
        capacities=memory.capacities(budget, setting.capacity, policy, layout, geometry.top_k),
        budget=budget,
        weights=weights,
        expert_ops=expert_ops,
        gate=GateRule.of(header),
        estimates=ProfileEstimates(hierarchy, costs, layout),
    )


def find_predictors(policy: Policy, there: Sequence[Predictor]) -> list[Predictor]:
    """Return the predictors that *policy* reads, one per name and horizon.

    Raises:
        InputError: If a part wants predictions that are not *there*.
    """
    found: dict[tuple[str, int], Predictor] = {}
    for part in policy.parts:
        if not part.uses_predictions:
            continue
        for horizon in part.horizons:
            fitting = [
                item
                for item in there
                if item.horizon == horizon and part.predictor in (None, item.name)
            ]
            if not fitting:
                known = ", ".join(f"{item.name} {item.horizon} ahead" for item in there) or "none"
                raise InputError(
                    f"policy '{policy.name}' reads the scores that "
                    f"{part.predictor or 'a predictor'} predicts {horizon} layers ahead",
                    where="policy",
                    way_out=f"the source has: {known}; capture with one, or set `predictor:`",
                )
            found[fitting[0].name, horizon] = fitting[0]
    return list(found.values())


class TraceSource(Source, ColumnSource, Protocol):
    """Recorded or made routing, which can be read as batches and as columns."""


def simulate(
    source: TraceSource,
    setting: Setting,
    *,
    sinks: Sequence[OnColumns] = (),
    on_plan: OnPlan | None = None,
    on_span: OnSpan | None = None,
    popularity: ColumnSource | None = None,
    machine: MachineFactory = SimMachine,
    on_step: Callable[[int], None] | None = None,
    stage: Stage | None = None,
) -> Result:
    """Run *source* under *setting* and return what came of it.

    *sinks* hear of the records block by block, *on_plan* of every decision, *on_span* of everything
    that occupied a lane, *on_step* of every forward step. *popularity* is a trace whose counts a
    `static` part may use; without one such a part goes by expert index. *stage* is what `set_up`
    makes of both, for a machine that has to know the policy beforehand.
    """
    stage = stage or set_up(source.header, setting, memory.extent_of(source))
    metrics = Metrics(setting.warmup_steps)
    recorder = Recorder(stage.layout, stage.energy, [metrics, *sinks])
    runs_on = machine(stage.hierarchy, stage.costs, stage.layout, on_span)
    planner = stage.planner(
        setting,
        future=foresee(source, stage) if stage.policy.needs_future else None,
        popularity=count(popularity, stage.layout) if popularity is not None else None,
        lateness=runs_on,
        on_plan=on_plan,
    )
    drive(source.batches(), planner, runs_on, recorder, on_step)
    recorder.flush()
    elapsed = runs_on.finish()
    found = metrics.summary()
    found["lossless"] = not stage.policy.alters_output
    found["accuracy"] = None  # a trace cannot say; `moetier evaluate` does
    return Result(
        metrics=found,
        warnings=[
            *warnings_of(
                stage.policy,
                stage.layout,
                stage.capacities[0],
                source.header.geometry.top_k,
                found,
                profiled=popularity is not None,
            ),
            *stage.budget.overflow(found["peak_bytes"]),
        ],
        known_limitations=[
            *limitations(source.header, setting.profile, stage.policy, stage.expert_ops),
            *stage.costs.remarks,
            *filter(None, [getattr(source, "assumption", None)]),  # of drawn predictions
        ],
        elapsed_ns=elapsed,
        stage=stage,
    )


def drive(
    batches: Iterable[LayerBatch],
    planner: Planner,
    machine: Machine,
    recorder: Recorder,
    on_step: Callable[[int], None] | None = None,
) -> None:
    """Step through *batches*: decide, perform, record. The loop every cell of the design shares."""
    step, execute, add = planner.step, machine.execute, recorder.add
    if on_step is None:
        for batch in batches:
            plan = step(batch)
            add(plan, execute(plan))
        return
    last = -1
    for batch in batches:
        if batch.step != last:
            last = batch.step
            on_step(last)
        plan = step(batch)
        add(plan, execute(plan))


def foresee(source: TraceSource, stage: Stage) -> Future:
    """Return the unique slices that every batch of *source* will need under this policy."""
    policy, layout = stage.policy, stage.layout
    context = Context(layout, stage.capacities[0], (), np.random.default_rng(0))
    policy.routing.start(context)
    policy.precision.start(context)
    return Future(
        list(dict.fromkeys(policy.precision.needed(policy.precision.narrow(batch))))
        for batch in map(policy.routing.route, source.batches())
    )


def count(profile: ColumnSource, layout: Layout) -> list[int]:
    """Return how often each slice's expert was chosen in the trace *profile*."""
    geometry = profile.header.geometry
    if (geometry.n_moe_layers, geometry.n_experts) != (layout.n_layers, layout.n_experts):
        raise InputError(
            f"the profile has {geometry.n_moe_layers} MoE layers of {geometry.n_experts} experts, "
            f"the run {layout.n_layers} of {layout.n_experts}",
            where="popularity",
            way_out="use a trace of the same model",
        )
    counts = np.zeros(layout.n_layers * layout.n_experts, np.int64)
    for rows in profile.columns():
        ids = rows.moe_layer[:, None].astype(np.int64) * layout.n_experts + rows.experts
        used = (rows.experts != PAD) & rows.valid[:, None]
        counts += np.bincount(ids[used], minlength=len(counts))
    return [int(n) for n in counts for _ in range(layout.n_parts)]
