"""Tests of what is kept of a run, on virtual machines and a clock that is set by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moetier.sim.machine.simulated import SimMachine
from moetier.sim.run import Setting, simulate
from moetier.sim.testing import toy_header, toy_profile, toy_trace
from moetier.validate.compare import observe as observing
from moetier.validate.compare.decisions import Decisions
from moetier.validate.compare.observe import Case, observe, simulated_host_ns

HEADER = toy_header(n_experts=4, layers=3)
TRACE = toy_trace(HEADER, [[[e], [(e + 1) % 4], [e]] for e in (0, 1, 2, 0, 3, 0, 1, 2)])
ASK = {"prefetch": "previous-token"}
BLOCK = 1 << 15  # rows that a recorder hands on at a time


def a_case(policy: Any = "on-demand", source: Any = TRACE, **profile: Any) -> Case:
    setting = Setting(toy_profile(**profile), policy, {"hbm": 80})  # two experts
    return Case("x", {"hbm": "80 B"}, source, setting)


def virtual(case: Case, around: Any, **observers: Any) -> Any:
    return simulate(case.source, case.setting, machine=around(SimMachine), **observers)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let every look at the clock find the next of these times."""
    times: list[int] = []
    monkeypatch.setattr(observing, "perf_counter_ns", lambda: times.pop(0) if times else 0)
    return times


def test_rows_are_those_of_the_run_whatever_their_blocks() -> None:
    many = toy_trace(HEADER, [[[e % 4], [(e + 1) % 4], [0]] for e in range(BLOCK // 3 + 9)])
    for source in (TRACE, many):
        seen: list[Any] = []
        case = a_case(source=source)
        found = observe(virtual, case)
        simulate(case.source, case.setting, sinks=[seen.append])

        for name in seen[0]:
            assert (found.rows[name] == np.concatenate([rows[name] for rows in seen])).all()
        assert len(found.rows["step"]) == len(found.host_ns) == len(found.beside)
    assert len(seen) > 1


def test_watching_changes_nothing() -> None:
    for policy in ("on-demand", ASK):
        plain = simulate(TRACE, a_case(policy).setting)
        assert observe(virtual, a_case(policy)).result.metrics == plain.metrics


def test_host_time_lies_between_batches(clock: list[int]) -> None:
    """The machine is called at 10, 100 and 1000, and has done at 40, 130 and 1500."""
    clock += [10, 40, 100, 130, 1000, 1500]
    found = observe(virtual, a_case())

    assert found.host_ns[:3].tolist() == [0, 100 - 40, 1000 - 130]


def test_a_batch_is_beside_copies_where_prefetches_are_under_way() -> None:
    """A link at a thousandth of the speed never gets done with what was brought early."""
    slow = observe(virtual, a_case(ASK, bandwidth="1 MB/s"))
    quick = observe(virtual, a_case(ASK, bandwidth="1000 GB/s"))
    without = observe(virtual, a_case(bandwidth="1 MB/s"))

    first = int(np.flatnonzero(slow.rows["prefetch_issued"])[0])
    assert not slow.beside[: first + 1].any()
    assert slow.beside[first + 1 :].any()
    assert not quick.beside.any()
    assert not without.beside.any()


def test_spans_are_those_of_the_machine() -> None:
    seen: list[Any] = []
    plain: list[Any] = []
    observe(virtual, a_case(), seen.append)
    simulate(TRACE, a_case().setting, on_span=plain.append)

    assert seen == plain != []


def test_plans_become_decisions() -> None:
    plans: list[Any] = []
    simulate(TRACE, a_case(ASK).setting, on_plan=plans.append)

    assert observe(virtual, a_case(ASK)).decisions.digest == Decisions.of(plans).digest


def test_what_a_policy_asks_the_machine_reaches_it() -> None:
    asked: list[Any] = []

    class Fake:
        """A machine that is asked about lateness."""

        def execute(self, plan: Any) -> Any:
            return plan

        def finish(self) -> int:
            return 11

        def landed(self, slice_id: int) -> bool:
            return slice_id == 3

        def queued_bytes(self) -> int:
            return 7

        def cancel(self, slices: Any) -> list[int]:
            asked.append(slices)
            return [5]

    def run(case: Case, around: Any, **observers: Any) -> Any:
        machine = around(lambda *_: Fake())(None, None, None)
        asked.append((machine.finish(), machine.landed(3), machine.landed(4)))
        asked.append((machine.queued_bytes(), machine.cancel([5, 6])))
        return virtual(case, around, **observers)

    observe(run, a_case())

    assert asked == [(11, True, False), [5, 6], (7, [5])]


def test_simulated_host_time_is_by_layer() -> None:
    """The first MoE layer stands for two layers of the model where one before has no experts."""
    header = toy_header(n_experts=4, layers=2)
    geometry = header.geometry.model_copy(update={"moe_layers": [1, 2], "n_layers": 3})
    source = toy_trace(header.model_copy(update={"geometry": geometry}), [[[0], [1]], [[2], [3]]])
    found = observe(virtual, a_case(source=source, gpu={"host_time_per_layer": "7 ns"}))

    assert simulated_host_ns(found).tolist() == [14, 7, 14, 7]
