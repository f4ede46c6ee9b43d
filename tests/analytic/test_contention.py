"""Contention: compute is slower while a copy into the fastest tier is in flight.

A toy copies and computes one byte per nanosecond; with a slowdown of 100 % compute progresses at
half speed beside a copy. Layer 0 has a dense part of 10 ns; an expert takes 40 ns.
"""

from fractions import Fraction
from math import ceil
from typing import Any

import pytest

from moetier.sim.hardware import Profile
from moetier.sim.machine.contention import Contention
from moetier.sim.testing import run, toy_header, toy_profile, toy_trace


def machine(slowdown: str = "100 %", **more: Any) -> Profile:
    return toy_profile(contention={"compute_slowdown": slowdown, "source": "a toy"}, **more)


def model(second: int = 10, expert: int = 40) -> Any:
    return toy_header(expert, layers=2, n_experts=16, top_k=4, dense_bytes=[10, second])


def stretched(work: int, busy: int, slowdown: Fraction) -> int:
    """How long *work* takes if a copy is in flight for the first *busy* ns of it."""
    if work * (1 + slowdown) <= busy:
        return ceil(work * (1 + slowdown))
    return ceil(busy + work - busy / (1 + slowdown))


@pytest.mark.parametrize("copy", [1, 2, 39, 40, 41, 79, 80, 81, 200])
@pytest.mark.parametrize("slowdown", ["100 %", "20 %", "250 %"])
def test_experts_are_slower_while_a_prefetch_is_in_flight(
    bench: Any, slowdown: str, copy: int
) -> None:
    profile = machine(slowdown, bandwidth="40 GB/s", latency=f"{copy - 1} ns")
    timing = bench(profile, model()).batch(hits=[0], prefetch=[16])
    took = stretched(40, copy, Fraction(slowdown.removesuffix(" %")) / 100)

    assert timing == (0, 10, 0, 0, took, 10 + took, 0, 0)


@pytest.mark.parametrize("second", [0, 1, 9, 10, 11, 20, 40])
def test_the_dense_part_is_slower_too(bench: Any, second: int) -> None:
    """16 is on the lane from 10 to 50 and 17 from 50 to 90; the experts of layer 0 end at 90."""
    loaded = bench(machine(), model(second))
    first = loaded.batch(hits=[0], prefetch=[16, 17, 18])
    dense = loaded.batch(1, hits=[16]).dense

    assert first.end == 90
    assert dense == stretched(second, 40, Fraction(1))  # 18 is on the lane from 90 to 130


@pytest.mark.parametrize("slowdown", ["0 %", "20 %", "250 %"])
def test_a_demand_alone_slows_nothing_without_overlap(bench: Any, slowdown: str) -> None:
    assert bench(machine(slowdown), model()).batch(fetch=[0]) == (0, 10, 40, 40, 40, 90, 0, 0)


@pytest.mark.parametrize(("copy", "second"), [(39, 60), (40, 60), (41, 61), (79, 80), (90, 90)])
def test_with_overlap_an_expert_is_slower_beside_the_copy_of_the_next(
    bench: Any, copy: int, second: int
) -> None:
    """0 begins at 10; the copy of 1 is in flight until 10 + copy, and 1 begins after both."""
    profile = machine(bandwidth="40 GB/s", latency=f"{copy - 1} ns")
    timing = bench(profile, model(), overlap=True).batch(hits=[0], fetch=[1])
    first = stretched(40, copy, Fraction(1))

    assert max(first, copy) == second
    assert timing.experts == first + 40
    assert timing.wait == second - first
    assert timing.end == 10 + second + 40


def test_what_began_beside_a_copy_goes_on_alone_and_beside_the_next(bench: Any) -> None:
    """Three experts of 40 ns; copies until 90 slow the first 80 ns to 40 of work: 80 + 80 more."""
    timing = bench(machine(), model()).batch(hits=[0, 1, 2], prefetch=[16, 17])

    assert (timing.experts, timing.end) == (160, 170)


@pytest.mark.parametrize("latency", [0, 18, 19, 20, 21, 38, 39, 40, 59])
def test_a_copy_on_a_lower_link_slows_nothing_until_it_reaches_the_fastest_tier(
    bench: Any, latency: int
) -> None:
    """The prefetch reaches dram after 20 ns, hbm 1 + latency later; the experts take 40 ns."""
    profile = machine(three={"bandwidth": "2 GB/s"}, bandwidth="40 GB/s", latency=f"{latency} ns")
    timing = bench(profile, model()).batch(hits=[0], prefetch=[16], prefetch_hops=[2])

    assert timing.experts == 20 + stretched(20, latency + 1, Fraction(1))


@pytest.mark.parametrize(
    ("copy", "dropped", "dense"), [(79, 0, 60), (80, 40, 30), (81, 40, 31), (100, 40, 40)]
)
def test_a_dropped_prefetch_slows_nothing(bench: Any, copy: int, dropped: int, dense: int) -> None:
    """The expert ends at 90; 17, evicted then, has begun only if 16 landed before that."""
    profile = machine(bandwidth="40 GB/s", latency=f"{copy - 1} ns")
    loaded = bench(profile, model(second=30))
    first = loaded.batch(hits=[0], prefetch=[16, 17], evicted=[17])
    second = loaded.batch(1, hits=[])

    assert (first.end, first.dropped, second.dense) == (90, dropped, dense)


def test_without_a_word_and_with_a_slowdown_of_nothing_are_the_same() -> None:
    trace = toy_trace(model(), [[[t, t + 1], [t + 2, t]] for t in range(8)])
    policy = {"prefetch": "oracle"}
    silent = run(trace, toy_profile(), policy, capacity={"hbm": 200})
    nothing = run(trace, machine("0 %"), policy, capacity={"hbm": 200})
    slow = run(trace, machine("10 %"), policy, capacity={"hbm": 200})

    assert silent.digest == nothing.digest != slow.digest
    assert slow.column("misses") == silent.column("misses")
    assert slow.result.elapsed_ns > silent.result.elapsed_ns


def test_a_run_says_whether_its_machine_knows() -> None:
    trace = toy_trace(model(), [[[0], [1]]])
    unknown = "'toy' does not say how much copies slow compute down; here they do not"
    silent = run(trace, toy_profile()).result.known_limitations

    assert unknown in silent
    assert unknown not in run(trace, machine("0 %")).result.known_limitations
    fitted = toy_profile(contention={"compute_slowdown": "1 %", "source": "fitted to a toy"})
    said = run(trace, fitted).result.known_limitations
    assert "fitted numbers in 'toy': contention" in said


def test_progress_is_exact() -> None:
    """Busy in every third nanosecond: 2 + 5/6 of work in three, so 17 take 18 ns."""
    contention = Contention(Fraction(1, 5), lambda at: (at % 3 == 2, at + 1))

    assert contention.end_of(0, 17) == 18
    assert contention.end_of(0, 18) == 19
    assert contention.end_of(2, 1) == 4
    assert contention.end_of(7, 0) == 7
