"""The contract of every registered part of a policy, in every seam.

A new part is tested by existing: nothing here names one. A part whose parameters have no defaults
gets an `int` of 4, a `float` of 0.5 or what its class says in `example`.
"""

import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from moetier.sim import memory
from moetier.sim.layout import Layout
from moetier.sim.machine.base import Span
from moetier.sim.machine.processes import ProcessMachine
from moetier.sim.machine.simulated import SimMachine
from moetier.sim.plan import LayerPlan
from moetier.sim.planner import Planner
from moetier.sim.policy.base import Eviction
from moetier.sim.policy.compose import compose, presets
from moetier.sim.policy.seams import DEFAULTS, SEAMS
from moetier.sim.run import Setting, Stage, foresee, set_up
from moetier.sim.testing import Run, run, toy_profile
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.traces.io import ArrayTrace
from moetier.traces.testing import small_header, small_rows

PARTS = [(seam, name) for seam, registry in SEAMS.items() for name in registry.names()]
EXAMPLES = {"int": 4, "float": 0.5}

SLICED = {"kind": "bit-sliced", "theta": 0.5, "group": 4}  # half of what is routed is critical

TOY = {  # rows are short: for a group, and beside a sector of memory
    "bit-sliced": {"group": 4},
    "channels": {"reads": "150 %", "recovery": "none"},
}

# What each part is combined with: it meets prefetches, cancellations and skipped slices.
COMPANY: list[dict[str, Any]] = [
    {},
    {"prefetch": {"kind": "previous-token", "depth": 3}},
    {"prefetch": {"kind": "previous-token", "depth": 2, "cancel": True}, "miss": "skip"},
    {"prefetch": "oracle", "miss": "cpu", "warmup": "random"},
    {"precision": SLICED, "miss": "degrade", "prefetch": {"kind": "previous-token", "depth": 2}},
]
SHAPES: dict[str, dict[str, Any]] = {
    "two tiers": {},
    "lockstep": {"requests": 3},
    "three tiers": {"tiers": ["hbm", "dram", "nvme"]},
    "exclusive": {"tiers": ["hbm", "dram", "nvme"], "exclusive": True},
}


def arguments_of(seam: str, name: str) -> dict[str, Any]:
    """Return arguments for what has no default."""
    registry = SEAMS[seam]
    example = dict(getattr(registry.get(name), "example", {}))
    for parameter in registry.parameters(name):
        if parameter.default is None and parameter.name not in example:
            assert parameter.type in EXAMPLES, (
                f"{seam} '{name}' needs '{parameter.name}': give it a default, or the class an "
                "`example`"
            )
            example[parameter.name] = EXAMPLES[parameter.type]
    return example


def spec_of(seam: str, name: str) -> dict[str, Any]:
    return {"kind": name, **arguments_of(seam, name)}


@cache
def trace(requests: int = 1, seed: int = 0, predictor: str = "p") -> ArrayTrace:
    """Return a trace with everything that one may have: scores, predictions, weights, residency."""
    small = small_header()
    named = [item.model_copy(update={"name": predictor}) for item in small.predictors]
    small = small.model_copy(update={"predictors": named})
    sizes: dict[str, Any] = small.geometry.model_dump(exclude_unset=True)
    sizes |= {"hidden": 8, "moe_intermediate": 4, "n_layers": 4, "dense_intermediate": 4}
    sizes |= {"heads": 1, "kv_heads": 1, "head_dim": 8, "vocab": 16}
    header = small.model_copy(update={"geometry": Geometry(**sizes)})
    return ArrayTrace(header, [small_rows(header, requests=requests, tokens=6, seed=seed)])


PROFILE = toy_profile(three={}, down={}, lanes=2)
ROOM = {"hbm": 5 * 192, "dram": 10 * 192}  # bytes: an expert has 192, a token uses 3 of each layer


def setting_of(seam: str, name: str, company: dict[str, Any], shape: dict[str, Any]) -> Setting:
    policy = company | {seam: spec_of(seam, name)}
    if SEAMS[seam].create(name, arguments_of(seam, name)).needs_bit_slices:
        policy["precision"] = SLICED
    elif seam == "precision" and name != "bit-sliced" and policy.get("miss") == "degrade":
        policy["miss"] = "fetch"
    if "oracle" in company.values() and any(part.follows_cache for part in compose(policy).parts):
        policy["prefetch"] = "previous-token"
    if "oracle" in company.values() and any(part.draws for part in compose(policy).parts):
        policy |= {"prefetch": "previous-token", "miss": "skip"}
    tiers = shape.get("tiers", ["hbm", "dram"])
    room = {tier: ROOM[tier] for tier in tiers[:-1]}
    return Setting(PROFILE, policy, room, tiers=tiers, exclusive="exclusive" in shape)


@dataclass
class Watched:
    """One batch, with what was resident in the fastest tier before and after it."""

    plan: LayerPlan
    before: set[int]
    after: set[int]
    stage: Stage

    @property
    def active(self) -> set[int]:
        """What the fastest tier computes with."""
        plan = self.plan
        return set(plan.needed) - {*plan.cpu, *plan.skip, *plan.degrade}

    @property
    def keeps(self) -> bool:
        """Whether what the batch used stays at least until the next one."""
        eviction = self.stage.policy.eviction[0]
        return type(eviction).release is Eviction.release or getattr(eviction, "keep_lsb", False)


def watch(source: ArrayTrace, setting: Setting) -> Iterator[Watched]:
    """Yield every batch of a run, stepped by hand."""
    stage = set_up(source.header, setting, memory.extent_of(source))
    machine = SimMachine(stage.hierarchy, stage.costs, stage.layout)
    planner = planner_of(source, stage, setting, machine)
    top = planner.caches[0]
    for batch in source.batches():
        before = set(top.resident)
        plan = planner.step(batch)
        machine.execute(plan)
        yield Watched(plan, before, set(top.resident), stage)


def planner_of(source: ArrayTrace, stage: Stage, setting: Setting, machine: Any) -> Planner:
    return Planner(
        stage.policy,
        stage.layout,
        stage.capacities,
        exclusive=setting.exclusive,
        seed=setting.seed,
        future=foresee(source, stage) if stage.policy.needs_future else None,
        lateness=machine,
        gate=stage.gate,
        estimates=stage.estimates,
    )


every_part = pytest.mark.parametrize(("seam", "name"), PARTS, ids=[f"{s}-{n}" for s, n in PARTS])
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
every_company = pytest.mark.parametrize("company", COMPANY, ids=range(len(COMPANY)))


@every_part
@every_shape
@every_company
def test_the_plan_of_every_batch_keeps_the_rules(
    seam: str, name: str, company: dict[str, Any], shape: dict[str, Any]
) -> None:
    for seen in watch(trace(shape.get("requests", 1)), setting_of(seam, name, company, shape)):
        plan, layout = seen.plan, seen.stage.layout
        eviction = seen.stage.policy.eviction[0]
        warmed = bool(plan.replaced or plan.warmup_bytes)

        own = layout.size(seen.active)
        capacity = seen.stage.capacities[0]
        if not eviction.ignores_capacity:
            assert layout.size(seen.after) <= max(capacity, own)
        assert plan.resident == layout.size(seen.after)
        assert plan.peak >= max(plan.resident, own if seen.active else 0)

        for slices in (plan.needed, plan.missing, plan.fetch, plan.prefetch, plan.evicted):
            assert len(slices) == len(set(slices))
        assert set(plan.missing) <= set(plan.needed)
        away = [*plan.cpu, *plan.skip, *plan.degrade]
        assert sorted([*plan.fetch, *away]) == sorted(plan.missing)
        assert not experts(plan.cpu, layout).intersection(experts(seen.active, layout))
        assert not experts(plan.skip, layout).intersection(experts(seen.active, layout))
        assert not set(plan.degrade).intersection(plan.fetch)
        if not warmed:
            assert set(plan.missing) == set(plan.needed) - (seen.before - set(plan.cancelled))
            came = {*plan.fetch, *plan.prefetch}
            left = {*plan.cancelled, *plan.evicted}
            assert seen.after == (seen.before - set(plan.cancelled) | came) - left | (came - left)
        if seen.keeps:
            assert not seen.active.intersection(plan.evicted)
            assert seen.active <= seen.after
        assert not set(plan.prefetch).intersection(plan.evicted)


@every_part
@every_shape
def test_both_machines_accept_it(seam: str, name: str, shape: dict[str, Any]) -> None:
    setting = setting_of(seam, name, COMPANY[1], shape)

    assert simulated(setting, shape).digest == simulated(setting, shape, ProcessMachine).digest


def simulated(setting: Setting, shape: dict[str, Any], machine: Any = SimMachine) -> Run:
    how = {k: getattr(setting, k) for k in ("capacity", "tiers", "exclusive", "seed")}
    return run(
        trace(shape.get("requests", 1)),
        PROFILE,
        setting.policy,
        machine=machine,
        watch=False,
        **how,
    )


@every_part
@every_company
def test_every_computed_slice_has_landed(seam: str, name: str, company: dict[str, Any]) -> None:
    """Physically: a copy up ended before the experts began, and the slice has not left since."""
    setting = setting_of(seam, name, company, SHAPES["lockstep"])
    seen = run(trace(3), PROFILE, setting.policy, capacity=setting.capacity, tiers=setting.tiers)
    landings: dict[int, list[Span]] = {}
    for span in seen.links():
        landings.setdefault(int(str(span.info["slice"])), []).append(span)
    since: dict[int, int] = {}  # slice -> when it last left
    brought = {s for w in watch(trace(3), setting) if w.plan.warmup_bytes for s in w.after}
    for i, plan in enumerate(seen.plans):
        end = seen.column("end_ns")[i]
        begin = end - seen.column("expert_ns")[i] if not plan.cpu else end
        since.update(dict.fromkeys(plan.replaced, seen.column("start_ns")[i]))
        for s in set(plan.needed) - {*plan.cpu, *plan.skip, *plan.degrade}:
            there = [span for span in landings.get(s, []) if since.get(s, 0) <= span.end <= begin]
            assert there or s in brought
        since.update(dict.fromkeys(plan.evicted, end))


@every_part
def test_a_run_is_deterministic_and_shares_nothing(seam: str, name: str) -> None:
    """Two runs stepped in turns decide as one alone."""
    setting = setting_of(seam, name, COMPANY[1], {})
    alone = [decisions(seen.plan) for seen in watch(trace(), setting)]
    turns = zip(watch(trace(), setting), watch(trace(1, 5), setting), strict=True)

    assert [decisions(mine.plan) for mine, _other in turns] == alone


@every_part
def test_start_again_equals_new(seam: str, name: str) -> None:
    """A part that is started a second time forgets the first run."""
    setting = setting_of(seam, name, COMPANY[1], {})
    source = trace()
    stage = set_up(source.header, setting, memory.extent_of(source))

    def log() -> list[list[list[int]]]:
        machine = SimMachine(stage.hierarchy, stage.costs, stage.layout)
        planner = planner_of(source, stage, setting, machine)
        found = []
        for batch in source.batches():
            plan = planner.step(batch)
            machine.execute(plan)
            found.append(decisions(plan))
        return found

    assert log() == log()


def decisions(plan: LayerPlan) -> list[list[int]]:
    lists = ("needed", "fetch", "cpu", "skip", "degrade", "prefetch", "evicted", "cancelled")
    return [list(getattr(plan, name)) for name in (*lists, "replaced")]


def experts(slices: Collection[int], layout: Layout) -> set[int]:
    return {layout.expert_of(s) for s in slices}


@every_part
def test_an_oracle_is_refused_without_a_future(seam: str, name: str) -> None:
    setting = setting_of(seam, name, {}, {})
    policy = compose(setting.policy)
    extent = memory.extent_of(trace())
    if policy.needs_future:
        with pytest.raises(InputError, match=r"is an oracle: .* use it on a trace"):
            set_up(trace().header, setting, extent, has_future=False)
    else:
        set_up(trace().header, setting, extent, has_future=False)


@every_part
def test_it_is_described_in_one_line(seam: str, name: str) -> None:
    assert SEAMS[seam].summary(name).endswith(".")


@every_part
def test_a_wrong_parameter_is_named(seam: str, name: str) -> None:
    wrong = spec_of(seam, name) | {"bogus": 1}
    with pytest.raises(InputError, match=rf"{seam} '{name}', parameter 'bogus'"):
        compose({seam: wrong})


@pytest.mark.parametrize("seam", SEAMS)
def test_a_typo_suggests_the_nearest(seam: str) -> None:
    name = DEFAULTS[seam]
    with pytest.raises(
        InputError, match=rf"policy.{seam}: unknown {seam} .* did you mean '{name}'"
    ):
        compose({seam: f"{name}x"})


@pytest.mark.parametrize("name", presets())
def test_every_preset_runs(name: str) -> None:
    parts = compose(name, ["hbm"]).parts
    wanted = next((part.predictor for part in parts if part.predictor), "p")
    given = presets()[name].get("precision", "full")
    short = TOY.get(given["kind"], {}) if isinstance(given, dict) else {}
    toy = {"precision": given | short} if short else {}
    seen = run(
        trace(predictor=wanted),
        PROFILE,
        {"preset": name} | toy,
        capacity={"hbm": ROOM["hbm"]},
        tiers=["hbm", "dram"],
        watch=False,
    )

    assert seen.metrics["tokens"] == 12 // 2


def test_parts_import_no_machine_and_no_clock() -> None:
    """In a process of its own: what the policies import, they import for every user."""
    code = (
        "import sys; from moetier.sim.policy.seams import SEAMS; from moetier.sim import planner; "
        "[registry.names() for registry in SEAMS.values()]; "
        "print(*[name for name in ('torch', 'simpy', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == ""
