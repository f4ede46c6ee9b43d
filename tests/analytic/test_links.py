"""Copies: when each starts and lands, as formulas, and from both sides of every nanosecond.

A toy copies one byte per nanosecond. Layer 0 has a dense part of 10 ns, and computing an expert of
40 bytes takes 40 ns; slices of layer 1 begin at 16.
"""

from typing import Any

import pytest

from moetier.sim.testing import toy_header, toy_profile


def model(second: int = 10, expert: int | list[int] = 40, **more: Any) -> Any:
    """Return two layers whose dense parts take 10 and *second* ns."""
    return toy_header(expert, layers=2, n_experts=16, top_k=4, dense_bytes=[10, second], **more)


def table(*rows: tuple[int, int, int]) -> list[dict[str, Any]]:
    return [{"size": f"{s} B", "lanes": n, "rate": f"{r} MB/s"} for s, n, r in rows]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_lane_copies_one_after_the_other(bench: Any, n: int) -> None:
    timing = bench(toy_profile(), model()).batch(fetch=list(range(n)))

    assert timing == (0, 10, 40 * n, 40 * n, 40 * n, 10 + 80 * n, 0, 0)


@pytest.mark.parametrize("latency", [0, 1, 7])
def test_latency_is_paid_by_every_copy(bench: Any, latency: int) -> None:
    profile = toy_profile(latency=f"{latency} ns")

    assert bench(profile, model()).batch(fetch=[0, 1]).wait == 2 * (40 + latency)


@pytest.mark.parametrize(
    ("lanes", "n", "wait"),
    [(1, 2, 80), (2, 1, 40), (2, 2, 40), (2, 3, 80), (2, 4, 80), (3, 4, 67), (4, 4, 40)],
)
def test_lanes_that_add_throughput_copy_in_parallel(
    bench: Any, lanes: int, n: int, wait: int
) -> None:
    """One lane has 1 B/ns, two and four 1 B/ns each, and three have 1.5 each."""
    profile = toy_profile(
        lanes=lanes, bandwidth=table((40, 1, 1000), (40, 2, 2000), (40, 3, 4500), (40, 4, 4000))
    )

    # four over three lanes: 27 ns for three of them, then one alone
    assert bench(profile, model()).batch(fetch=list(range(n))).wait == wait


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_lanes_that_share_a_constant_rate_gain_nothing_and_lose_nothing(bench: Any, n: int) -> None:
    assert bench(toy_profile(lanes=n), model()).batch(fetch=list(range(n))).wait == 40 * n


@pytest.mark.parametrize(("expert", "wait"), [(40, 80), (20, 20), (80, 160), (10, 10)])
def test_the_rate_goes_by_the_size_of_the_transfer(bench: Any, expert: int, wait: int) -> None:
    profile = toy_profile(bandwidth=table((20, 1, 1000), (40, 1, 500)))

    assert bench(profile, model(expert=expert)).batch(fetch=[0]).wait == wait


def test_the_rate_is_fixed_at_the_start(bench: Any) -> None:
    """Of two that share 1 B/ns, the longer keeps its half when the other is done."""
    loaded = bench(toy_profile(lanes=2), model(second=0, expert=[40, 80]))
    loaded.batch(hits=[0], prefetch=[16, 1])  # 16: 80 B, 1: 40 B; both start at 10
    second = loaded.batch(1, hits=[16])  # asked at 50; 16 lands at 10 + 2 * 80

    assert (second.start, second.wait, second.late) == (50, 120, 1)


def test_a_transfer_counts_the_lanes_busy_when_it_starts(bench: Any) -> None:
    """One starts alone at 1 B/ns; the next, beside it, gets half; the first keeps its rate."""
    loaded = bench(toy_profile(lanes=2), model(second=0, expert=[40, 80]))
    loaded.batch(hits=[0], prefetch=[16])  # alone: from 10 to 90
    second = loaded.batch(1, hits=[], fetch=[17])  # asked at 50: 80 B at half the rate

    assert (second.start, second.wait) == (50, 160)
    assert loaded.machine.landed(16)


# -- a prefetch in the way of a demand. The first lands at 50, when the batch ends; the second is on
# -- the lane from 50 to 90, unless a demand comes in the same nanosecond.


@pytest.mark.parametrize(
    ("asked", "wait"),
    [(50, 40), (51, 39 + 40), (52, 38 + 40), (89, 1 + 40), (90, 40), (91, 40), (130, 40)],
)
def test_a_prefetch_in_flight_delays_a_demand_by_its_remainder(
    bench: Any, asked: int, wait: int
) -> None:
    loaded = bench(toy_profile(), model(second=asked - 50))
    loaded.batch(hits=[0], prefetch=[16, 17])
    timing = loaded.batch(1, fetch=[18])

    assert timing.start + timing.dense == asked
    assert timing.wait == timing.copy == wait
    assert timing.late == 0


@pytest.mark.parametrize(
    ("asked", "wait", "late"), [(50, 40, 1), (51, 39, 1), (89, 1, 1), (90, 0, 0), (91, 0, 0)]
)
def test_a_prefetch_is_waited_for_until_it_lands(
    bench: Any, asked: int, wait: int, late: int
) -> None:
    loaded = bench(toy_profile(), model(second=asked - 50))
    loaded.batch(hits=[0], prefetch=[16, 17])
    timing = loaded.batch(1, hits=[17])

    assert (timing.wait, timing.late) == (wait, late)
    assert timing.copy == (40 if asked == 50 else 0)  # demanded while it was queued: a demand copy


def test_a_queued_prefetch_that_is_demanded_overtakes_the_others(bench: Any) -> None:
    """At 60 the lane carries 17 until 90; 19 is promoted and goes before 18, and before a fetch."""
    loaded = bench(toy_profile(), model(second=10))
    loaded.batch(hits=[0], prefetch=[16, 17, 18, 19])
    timing = loaded.batch(1, hits=[19], fetch=[20])

    assert timing.wait == timing.copy == 90 + 40 + 40 - 60
    assert timing.late == 1
    assert loaded.machine.landed(18)  # 170 to 210, while the batch computes until 250


def test_queued_prefetches_follow_the_demands_in_order(bench: Any) -> None:
    loaded = bench(toy_profile(), model(second=10))
    loaded.batch(hits=[0], prefetch=[16, 17, 18])  # 16: 10-50, 17: 50-90
    loaded.batch(1, fetch=[20])  # asked at 60: 90-130, and computes until 170; 18: 130-170
    assert loaded.machine.landed(18)
    third = loaded.batch(0, hits=[0])

    assert (third.start, third.wait) == (170, 0)
    assert loaded.machine.finish() == third.end


@pytest.mark.parametrize(("expert", "landed"), [(39, True), (40, True), (41, False)])
def test_landed_says_so_in_the_nanosecond_itself(bench: Any, expert: int, landed: bool) -> None:
    """Asked at 10, the first batch ends at 50: a copy of 40 ns has landed, one of 41 ns has not."""
    loaded = bench(toy_profile(), model(expert=[40, expert]))
    loaded.batch(hits=[0], prefetch=[16])

    assert loaded.machine.landed(16) is landed
    assert loaded.machine.queued_bytes() == (0 if landed else expert)
    assert loaded.machine.landed(31)  # nothing known: it was never under way


@pytest.mark.parametrize(
    ("expert", "withdrawn"), [(39, [18]), (40, [17, 18]), (41, [17, 18]), (81, [17, 18])]
)
def test_what_has_started_is_never_cancelled(bench: Any, expert: int, withdrawn: list[int]) -> None:
    """The first batch ends at 50. Copies of 39 ns: 17 starts at 49; of 40: it would start at 50."""
    loaded = bench(toy_profile(), model(expert=[40, expert]))
    loaded.batch(hits=[0], prefetch=[16, 17, 18])

    assert loaded.machine.cancel([16, 17, 18, 19]) == withdrawn
    assert loaded.machine.queued_bytes() == (0 if expert == 40 else expert)
    assert loaded.machine.finish() == max(50, 10 + expert * (3 - len(withdrawn)))


@pytest.mark.parametrize(("expert", "dropped"), [(39, 39), (40, 80), (41, 82)])
def test_a_queued_prefetch_that_leaves_the_plan_is_dropped(
    bench: Any, expert: int, dropped: int
) -> None:
    loaded = bench(toy_profile(), model(expert=[40, expert]))
    timing = loaded.batch(hits=[0], prefetch=[16, 17, 18], evicted=[16, 17, 18])

    assert timing.dropped == dropped
    assert loaded.machine.queued_bytes() == 0
    assert loaded.machine.finish() == max(50, 10 + 3 * expert - dropped)


def test_what_warm_up_replaced_is_dropped_before_the_batch(bench: Any) -> None:
    """Otherwise the batch would find its miss under way, and copy it twice."""
    loaded = bench(toy_profile(), model())
    loaded.batch(hits=[0], prefetch=[16, 17])
    timing = loaded.batch(1, fetch=[17], replaced=[16, 17])

    assert (timing.dropped, timing.late, timing.wait) == (40, 0, 40)


def test_promoted_prefetches_and_fetches_are_one_group(bench: Any) -> None:
    """They start together when both lanes fall idle, and so each gets 2 B/ns.

    16 and 17 travel from 10 to 30, two more from 30 to 50, two from 50 to 70. At 60, 22, which has
    waited since 10, is demanded with 30.
    """
    profile = toy_profile(lanes=2, bandwidth=table((40, 1, 1000), (40, 2, 4000)))
    loaded = bench(profile, model(second=10))
    loaded.batch(hits=[0], prefetch=[16, 17, 18, 19, 20, 21, 22])
    timing = loaded.batch(1, hits=[22], fetch=[30])

    assert timing.wait == 70 + 20 - 60


def test_demands_do_not_count_the_prefetch_that_fills_the_other_lane(bench: Any) -> None:
    """Demands take their lanes first, prefetches what is left: 1 at full rate, 16 at half."""
    loaded = bench(toy_profile(lanes=2), model(second=0))
    timing = loaded.batch(fetch=[1], prefetch=[16])
    late = loaded.batch(1, hits=[16])

    assert (timing.wait, timing.end) == (40, 90)
    assert (late.wait, late.late) == (0, 0)  # 10 + 80 = 90
