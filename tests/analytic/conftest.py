"""Three machines that must give the same times, and a bench to drive one by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from moetier.sim.hardware import Profile
from moetier.sim.machine.base import LayerTiming, Machine
from moetier.sim.machine.processes import ProcessMachine
from moetier.sim.machine.simulated import SimMachine
from moetier.sim.memory import Extent
from moetier.sim.plan import LayerPlan
from moetier.sim.run import MachineFactory, Setting, set_up
from moetier.sim.testing import Run, run
from moetier.traces.batch import DECODE, LayerBatch
from moetier.traces.schema import Header

HOWS: dict[str, dict[str, Any]] = {
    "fast": {"machine": SimMachine, "watch": False},
    "watched": {"machine": SimMachine, "watch": True},
    "processes": {"machine": ProcessMachine, "watch": True},
}


@pytest.fixture(params=HOWS)
def how(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = HOWS[request.param]
    return found


@pytest.fixture
def play(how: dict[str, Any]) -> Callable[..., Run]:
    """Simulate a trace on each machine in turn."""

    def start(trace: Any, profile: Profile, *args: Any, **setting: Any) -> Run:
        return run(trace, profile, *args, **(how | setting))

    return start


class Bench:
    """A machine that gets its plans by hand; 16 experts a layer, so layer 1 begins at slice 16."""

    def __init__(
        self, factory: MachineFactory, watch: bool, profile: Profile, header: Header, **setting: Any
    ) -> None:
        """Set up and begin idle."""
        extent = Extent(context=1, steps=1, prefill_tokens=0, decode_tokens=1)
        stage = set_up(header, Setting(profile, **setting), extent)
        self.machine: Machine = factory(
            stage.hierarchy, stage.costs, stage.layout, (lambda _: None) if watch else None
        )

    def batch(
        self,
        layer: int = 0,
        *,
        hits: Sequence[int] = (),
        fetch: Sequence[int] = (),
        cpu: Sequence[int] = (),
        **more: Any,
    ) -> LayerTiming:
        """Perform one decode batch; *more* overrides fields of its plan."""
        needed = [*hits, *fetch, *cpu]
        experts = [s % 16 for s in needed]
        plan = LayerPlan(LayerBatch(0, DECODE, layer, 1, 1, experts), needed, [*fetch, *cpu])
        plan.fetch, plan.cpu, plan.cpu_assignments = list(fetch), list(cpu), len(cpu)
        for name, value in more.items():
            setattr(plan, name, value)
        return self.machine.execute(plan)


@pytest.fixture
def bench(how: dict[str, Any]) -> Callable[..., Bench]:
    """Return a maker of benches for each machine in turn."""

    def make(profile: Profile, header: Header, **setting: Any) -> Bench:
        return Bench(how["machine"], how["watch"], profile, header, **setting)

    return make
