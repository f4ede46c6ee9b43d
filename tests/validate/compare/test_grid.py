"""Tests of what a comparison says about times, rankings and causes, on made-up runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moetier.sim.machine.simulated import SimMachine
from moetier.sim.run import Setting, simulate
from moetier.sim.testing import toy_header, toy_profile, toy_trace
from moetier.traces.batch import DECODE, PREFILL
from moetier.validate.compare.attribution import attribute, stall_ms, timed_rows
from moetier.validate.compare.decisions import Decisions
from moetier.validate.compare.grid import Point, run_grid, summarise
from moetier.validate.compare.observe import Case, observe
from moetier.validate.compare.ranking import Ranking, Timed, rank

TRACE = toy_trace(toy_header(n_experts=4), [[[e]] for e in (0, 1, 2, 0, 3, 0, 1, 2)])


@pytest.fixture(autouse=True)
def no_host_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no time pass between batches: virtual time stands in for a measurement here."""
    monkeypatch.setattr("moetier.validate.compare.observe.perf_counter_ns", lambda: 0)


def a_case(policy: Any = "on-demand", **profile: Any) -> Case:
    setting = Setting(toy_profile(**profile), policy, {"hbm": 120})
    return Case(str(policy), {"hbm": "120 B"}, TRACE, setting)


def virtual(case: Case, around: Any, **observers: Any) -> Any:
    return simulate(case.source, case.setting, machine=around(SimMachine), **observers)


def slower(by: float) -> Any:
    """Return a run whose link has *by* times the bandwidth."""

    def run(case: Case, around: Any, **observers: Any) -> Any:
        data = case.setting.profile.model_dump(mode="json")
        number, unit = data["links"][0]["bandwidth"].split()
        data["links"][0]["bandwidth"] = f"{float(number) * by} {unit}"
        profile = type(case.setting.profile).model_validate(data)
        setting = Setting(**{**vars(case.setting), "profile": profile})
        return simulate(case.source, setting, machine=around(SimMachine), **observers)

    return run


def point(**given: Any) -> Point:
    about: dict[str, Any] = {
        "policy": "a", "capacity": {"dram": "10 %"}, "asks_lateness": False,
        "decision_log_equal": True, "bytes_equal": True, "first_difference": None,
        "miss_rate": 0.5, "bytes_read_total": 1, "tpot_sim_ms": 11.0,
        "tpot_measured_ms": [10.0, 9.0, 10.5], "stall_share_sim": 0.5,
        "stall_share_measured": [0.4, 0.5, 0.6], "stall_sim_ms": 5.5,
        "stall_measured_ms": [4.0, 4.5, 6.3], "attribution_ms": None,
    }  # fmt: skip
    return Point(**(about | given))


def test_the_same_machine_twice_has_no_error() -> None:
    (found,) = run_grid([a_case()], virtual, virtual, repeats=2)

    assert found.decision_log_equal
    assert found.bytes_equal
    assert found.error == found.spread == 0
    assert found.attribution_ms is not None
    assert found.attribution_ms["link"] == found.attribution_ms["compute"] == 0


def test_a_slower_link_shows_up_as_the_link() -> None:
    (found,) = run_grid([a_case()], virtual, slower(0.5), repeats=1)

    assert found.decision_log_equal
    assert found.error < -0.2
    told = found.attribution_ms
    assert told is not None
    assert told["link"] == pytest.approx(found.tpot_measured_ms[0] - found.tpot_sim_ms)
    assert told["compute"] == told["contention"] == 0


def test_other_decisions_are_named_and_not_attributed() -> None:
    def other(case: Case, around: Any, **observers: Any) -> Any:
        setting = Setting(**{**vars(case.setting), "policy": {"eviction": "fifo"}})
        return simulate(case.source, setting, machine=around(SimMachine), **observers)

    (found,) = run_grid([a_case()], virtual, other, repeats=1)

    assert not found.decision_log_equal
    assert found.first_difference is not None
    assert "layer 0" in found.first_difference
    assert found.attribution_ms is None
    assert not summarise([found]).equal


def test_every_case_is_measured_as_often_as_asked_in_an_order_that_changes() -> None:
    seen: list[str] = []

    def noted(case: Case, around: Any, **observers: Any) -> Any:
        seen.append(case.policy)
        return virtual(case, around, **observers)

    cases = [a_case({"eviction": e}) for e in ("lru", "fifo", "lfu", "layer-lfu")]
    done: list[tuple[int, int]] = []
    run_grid(cases, virtual, noted, repeats=3, on_progress=lambda *at: done.append(at))

    rounds = [seen[at : at + 4] for at in range(0, 12, 4)]
    assert all(sorted(one) == sorted(rounds[0]) for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1
    assert done[-1] == (16, 16)


def test_an_error_is_a_share_of_the_median() -> None:
    found = point()

    assert found.error == pytest.approx(0.1)
    assert found.spread == pytest.approx(0.15)
    assert summarise([found]).median_error == pytest.approx(0.1)
    assert found.as_dict()["error"] == found.error


def test_errors_beyond_the_spread_are_figures_of_their_own() -> None:
    """Errors of 10 % and of 100 % with a spread of 15 % and of 10 %."""
    points = [point(), point(tpot_sim_ms=20.0, tpot_measured_ms=[10.0, 10.0, 11.0])]
    found = summarise(points)

    assert found.median_error == pytest.approx((0.1 + 1.0) / 2)
    assert found.p90_error == pytest.approx(0.1 + 0.9 * 0.9)
    assert found.median_error_beyond_spread == pytest.approx(0.9 / 2)
    assert found.p90_error_beyond_spread == pytest.approx(0.9 * 0.9)
    assert points[0].error_beyond_spread == 0
    too_low = point(tpot_sim_ms=5.0, tpot_measured_ms=[10.0, 9.0, 10.0])
    assert too_low.error_beyond_spread == pytest.approx(0.4)


def test_lateness_may_change_decisions() -> None:
    late = point(asks_lateness=True, decision_log_equal=False, bytes_equal=False)

    assert summarise([late]).equal
    assert not summarise([point(bytes_equal=False)]).equal


def test_policies_are_ranked_at_equal_capacity_only() -> None:
    fast = point(tpot_sim_ms=5.0, tpot_measured_ms=[5.0])
    slow = point(tpot_sim_ms=20.0, tpot_measured_ms=[20.0])
    elsewhere = point(capacity={"dram": "20 %"}, tpot_sim_ms=1.0, tpot_measured_ms=[99.0])

    assert summarise([fast, slow, elsewhere]).kendall_tau == 1
    assert summarise([fast, elsewhere]).kendall_tau is None


def test_pairs_closer_than_their_spread_are_ties() -> None:
    near = [Timed(2.0, [10, 12]), Timed(1.0, [11, 13])]
    far = [Timed(2.0, [10, 12]), Timed(1.0, [20, 21])]

    assert rank(near) == Ranking(ties=1)
    assert rank(far) == Ranking(discordant=1)
    assert rank(far).tau == -1
    assert rank([Timed(1.0, [1]), Timed(1.0, [5])]) == Ranking(undecided=1)


def test_steps_that_follow_a_decode_step_are_timed() -> None:
    rows = {
        "step": np.array([0, 1, 1, 2, 3, 4, 5]),
        "phase": np.array([PREFILL, DECODE, DECODE, DECODE, PREFILL, DECODE, DECODE]),
    }

    assert timed_rows(rows).tolist() == [False, False, False, True, False, False, True]


@pytest.mark.parametrize(
    ("warmup", "kept"), [(0, [2, 3, 6]), (1, [2, 3, 6]), (2, [3, 6]), (4, [6])]
)
def test_steps_of_the_warm_up_are_not_timed(warmup: int, kept: list[int]) -> None:
    """Decode steps are 1, 2, 3, 5 and 6; the first of each row of them is never timed."""
    steps = np.array([0, 1, 2, 2, 3, 4, 5, 6])
    phase = np.where(np.isin(steps, [0, 4]), PREFILL, DECODE)
    timed = timed_rows({"step": steps, "phase": phase}, warmup)

    assert np.unique(steps[timed]).tolist() == kept


def test_stall_is_the_wait_per_timed_step() -> None:
    rows = {
        "step": np.array([0, 1, 1, 2, 2, 3]),
        "phase": np.array([PREFILL, *[DECODE] * 5]),
        "wait_ns": np.array([9, 9, 9, 1, 2, 4]) * 1_000_000,
    }

    assert stall_ms(rows) == pytest.approx(3.5)
    assert stall_ms(rows, warmup_steps=2) == pytest.approx(4.0)
    assert stall_ms(rows, warmup_steps=3) is None


def test_warm_up_is_left_out_of_every_figure_of_a_point() -> None:
    """The parts of the difference add up to it, and the stall is the time that is no compute."""
    case = replace(a_case(), setting=replace(a_case().setting, warmup_steps=3))
    (found,) = run_grid([case], virtual, slower(0.5), repeats=1)
    (whole,) = run_grid([a_case()], virtual, slower(0.5), repeats=1)

    told = found.attribution_ms
    assert told is not None
    assert sum(told.values()) == pytest.approx(found.tpot_measured_ms[0] - found.tpot_sim_ms)
    assert found.stall_measured_ms[0] is not None
    assert found.stall_sim_ms is not None
    assert found.stall_measured_ms[0] > found.stall_sim_ms
    share = observe(slower(0.5), case).result.metrics
    assert share["time_breakdown_ms"]["wait"] == pytest.approx(found.stall_measured_ms[0])
    assert whole.stall_measured_ms != found.stall_measured_ms


def test_contention_is_what_batches_beside_copies_err_more() -> None:
    one = observe(virtual, a_case())
    two = observe(virtual, a_case())
    timed = np.flatnonzero(timed_rows(two.rows))
    two.rows["expert_ns"] = two.rows["expert_ns"] + 1_000_000
    two.rows["expert_ns"][timed[0]] += 6_000_000
    two.beside[timed[0]] = True

    told = attribute(one, two)

    assert told is not None
    assert told["compute"] == pytest.approx(1.0)
    assert told["contention"] == pytest.approx(6.0 / len(timed))


def test_decisions_differ_where_a_plan_does() -> None:
    plans: list[Any] = []
    simulate(TRACE, a_case().setting, on_plan=plans.append)
    same = Decisions.of(plans)
    assert same.first_difference(Decisions.of(plans)) is None
    assert same.digest == Decisions.of(plans).digest

    plans[3].evicted = [2]

    changed = Decisions.of(plans)
    assert same.first_difference(changed) == "step 3, layer 0: evicted"
    assert same.digest != changed.digest
    assert same.first_difference(Decisions.of(plans[:2])) == "8 batches, and 2"
