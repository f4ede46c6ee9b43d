"""Overlap: each expert begins when its own slices are there, one after the other.

A toy copies and computes one byte per nanosecond. Layer 0 has a dense part of 10 ns; an expert of
40 bytes takes 40 ns to copy and 40 ns to compute.
"""

from typing import Any

import pytest

from moetier.sim.layout import Layout
from moetier.sim.machine.costs import Costs
from moetier.sim.memory import Extent
from moetier.sim.plan import LayerPlan
from moetier.sim.run import Setting, set_up
from moetier.sim.testing import toy_header, toy_profile, toy_trace
from moetier.traces.batch import DECODE, LayerBatch


def model(second: int = 10, expert: int = 40, **more: Any) -> Any:
    return toy_header(expert, layers=2, n_experts=16, top_k=4, dense_bytes=[10, second], **more)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_copies_run_beside_the_experts_before_them(bench: Any, n: int) -> None:
    """The last of n copies lands at 10 + 40 n, and only its own expert is left to compute."""
    fetch = list(range(n))
    overlapped = bench(toy_profile(), model(), overlap=True).batch(fetch=fetch)

    assert overlapped == (0, 10, 40, 40 * n, 40 * n, 10 + 40 * n + 40, 0, 0)
    assert bench(toy_profile(), model()).batch(fetch=fetch).end == 10 + 80 * n


@pytest.mark.parametrize(("copy", "wait"), [(1, 0), (39, 0), (40, 0), (41, 1), (42, 2), (100, 60)])
def test_a_resident_expert_hides_the_copy_of_another(bench: Any, copy: int, wait: int) -> None:
    loaded = bench(
        toy_profile(latency=f"{copy - 1} ns", bandwidth="40 GB/s"), model(), overlap=True
    )
    timing = loaded.batch(hits=[0], fetch=[1])

    assert (timing.wait, timing.copy, timing.experts) == (wait, copy, 80)
    assert timing.end == 10 + 80 + wait


def test_resident_experts_go_first_whatever_the_plan_says(play: Any) -> None:
    """Token 1 asks for 2, 0, 1 of which 0 is resident; 2 and 1 land at once, in plan order."""
    trace = toy_trace(toy_header(top_k=3, n_experts=3), [[[0]], [[2, 0, 1]]])
    rates = [{"size": "40 B", "lanes": n, "rate": f"{n} GB/s"} for n in (1, 2)]
    fast = toy_profile(lanes=2, bandwidth=rates)
    seen = play(trace, fast, capacity={"hbm": 120}, overlap=True)
    experts = [s for s in seen.spans if s.name.startswith("expert ")]

    assert seen.column("wait_ns") == [40, 0]
    assert seen.column("copy_ns") == [40, 40]
    if experts:  # somebody watched
        assert [(s.name, s.start, s.end) for s in experts] == [
            ("expert 0", 50, 90),
            ("expert 0", 100, 140),
            ("expert 2", 140, 180),
            ("expert 1", 180, 220),
        ]
        waits = [(s.start, s.end) for s in seen.spans if s.name == "wait"]
        assert waits == [(10, 50)]


@pytest.mark.parametrize("overhead", [0, 1, 7])
def test_the_overhead_of_the_call_is_paid_once_by_the_first(bench: Any, overhead: int) -> None:
    """The second begins at 10 + 40 + overhead, after its copy has landed at 50."""
    profile = toy_profile(gpu={"overhead": f"{overhead} ns"})
    timing = bench(profile, model(), overlap=True).batch(hits=[0], fetch=[1])

    assert timing.dense == 10 + overhead  # the dense part is a call of its own
    assert timing.experts == 80 + overhead
    assert (timing.wait, timing.end) == (0, 10 + overhead + 80 + overhead)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("rate", "took"), [(3, 40), (7, 18), (11, 11)])
def test_compute_of_resident_experts_adds_up(
    bench: Any, overlap: bool, rate: int, took: int
) -> None:
    """Three of 40 bytes at 3, 7 or 11 B/ns: rounded up once, not once each."""
    loaded = bench(toy_profile(hbm={"bandwidth": f"{rate} GB/s"}), model(0), overlap=overlap)
    timing = loaded.batch(1, hits=[16, 17, 18])

    assert (timing.wait, timing.experts, timing.end) == (0, took, took)


@pytest.mark.parametrize(("asked", "wait"), [(50, 0), (89, 0), (90, 0)])
def test_a_prefetch_on_its_way_is_waited_for_by_its_expert_alone(
    bench: Any, asked: int, wait: int
) -> None:
    """17 is on the lane from 50 to 90; 18 is resident and computed meanwhile."""
    loaded = bench(toy_profile(), model(second=asked - 50), overlap=True)
    loaded.batch(hits=[0], prefetch=[16, 17])
    timing = loaded.batch(1, hits=[17, 18])

    assert (timing.wait, timing.experts, timing.end) == (wait, 80, asked + 80)
    assert timing.late == int(asked < 90)


@pytest.mark.parametrize(("slow", "wait"), [(39, 0), (40, 0), (41, 1)])
def test_the_cpu_still_computes_its_experts_in_one_piece(bench: Any, slow: int, wait: int) -> None:
    profile = toy_profile(cpu={"overhead": f"{slow} ns"})
    timing = bench(profile, model(), overlap=True).batch(hits=[0, 1], cpu=[2])

    assert (timing.experts, timing.wait, timing.end) == (80, wait, 10 + 80 + wait)


def test_an_expert_begins_when_the_last_of_its_parts_is_there(how: dict[str, Any]) -> None:
    """Parts of 24 and 16 bytes. 1 waits for its second, 2 for its first: 24 + 16 ns of copies."""
    stage = set_up(model(), Setting(toy_profile(), overlap=True), Extent(1, 1, 0, 1))
    layout = Layout([[24, 16]] * 2, 16)
    costs = Costs(stage.hierarchy, stage.costs.dense, layout, 0)
    spans: list[Any] = []
    machine = how["machine"](stage.hierarchy, costs, layout, spans.append if how["watch"] else None)
    plan = LayerPlan(LayerBatch(0, DECODE, 0, 1, 1, [1, 2]), [2, 3, 4, 5], [4, 3])
    timing = machine.execute(plan)

    # 2 is there at 10 + 24 and computes until 74; 1 at 10 + 24 + 16 = 50, until 114
    assert timing == (0, 10, 24, 40, 80, 114, 0, 0)
    if spans:
        assert [(s.name, s.start, s.end) for s in spans if s.name.startswith("expert ")] == [
            ("expert 2", 34, 74),
            ("expert 1", 74, 114),
        ]


def test_parts_that_are_done_without_take_no_time(how: dict[str, Any]) -> None:
    stage = set_up(model(), Setting(toy_profile(), overlap=True), Extent(1, 1, 0, 1))
    layout = Layout([[24, 16]] * 2, 16)
    costs = Costs(stage.hierarchy, stage.costs.dense, layout, 0)
    plan = LayerPlan(LayerBatch(0, DECODE, 0, 1, 1, [1, 2]), [2, 3, 4, 5], [3])
    plan.fetch, plan.degrade = [], [3]

    timing = how["machine"](stage.hierarchy, costs, layout, None).execute(plan)

    assert timing == (0, 10, 0, 0, 24 + 40, 74, 0, 0)
    assert costs.per_expert(plan, 64) == (0, [(1, [2], 24), (2, [4, 5], 40)])


@pytest.mark.parametrize(("peak", "shares"), [("4 GOP/s", [20, 40, 20]), ("8 GOP/s", [20, 20, 20])])
def test_experts_share_what_bounds_the_batch(peak: str, shares: list[int]) -> None:
    """Expert 5 has two tokens of four. At 4 operations per ns they bound it, at 8 the bytes do."""
    header = model(hidden=5, moe_intermediate=1)  # 30 operations per token
    profile = toy_profile(gpu={"peak": peak}, hbm={"bandwidth": "2 GB/s"})
    stage = set_up(header, Setting(profile), Extent(1, 1, 0, 1))
    costs = Costs(stage.hierarchy, stage.costs.dense, stage.layout, 80)
    plan = LayerPlan(LayerBatch(0, DECODE, 0, 4, 1, [4, 5, 5, 6]), [4, 5, 6], [])
    total = costs.expert_ns(plan)[0]

    assert total == sum(shares)
    assert [part.ns for part in costs.per_expert(plan, total)[1]] == shares


def test_a_batch_that_only_skips_has_nothing_to_share_out() -> None:
    stage = set_up(model(), Setting(toy_profile()), Extent(1, 1, 0, 1))
    plan = LayerPlan(LayerBatch(0, DECODE, 0, 1, 1, [4]), [4], [4])
    plan.skip, plan.skip_assignments = [4], 1

    assert stage.costs.expert_ns(plan)[0] == 0
    assert stage.costs.per_expert(plan, 0) == (0, [])


def test_overlap_never_loses_against_waiting_for_all(play: Any) -> None:
    tokens = [
        [[t % 5, (3 * t + 1) % 6], [(2 * t) % 6, (t + 5) % 6 - (t % 6 == 0)]] for t in range(9)
    ]
    trace = toy_trace(toy_header(layers=2, n_experts=6, top_k=2), tokens)
    plain, overlapped = (
        play(trace, toy_profile(), capacity={"hbm": 240}, overlap=overlap)
        for overlap in (False, True)
    )

    assert overlapped.result.elapsed_ns < plain.result.elapsed_ns
    assert overlapped.column("misses") == plain.column("misses")
    assert overlapped.column("expert_ns") == plain.column("expert_ns")
