"""Three tiers, the way back down, and a processor on the second tier, as formulas.

Both links copy one byte per nanosecond unless a test says otherwise; an expert has 40 bytes, the
dense part takes 10 ns, and computing an expert 40 ns on either processor.
"""

from typing import Any

import pytest

from moetier.sim.testing import toy_header, toy_profile, toy_trace

MODEL = toy_header(layers=2, n_experts=16, top_k=4)
ROOM = {"hbm": 1280, "dram": 1280}


def three(**link: Any) -> Any:
    return toy_profile(three=link)


@pytest.mark.parametrize(("hops", "wait"), [([1], 40), ([2], 80)])
def test_two_hops_take_the_sum(bench: Any, hops: list[int], wait: int) -> None:
    timing = bench(three(), MODEL).batch(fetch=[0], fetch_hops=hops)

    assert timing.wait == timing.copy == wait


@pytest.mark.parametrize(
    ("rate", "n", "wait"),
    [
        (
            "1 GB/s",
            2,
            40 + 2 * 40,
        ),  # pipelined: the second hop of one runs beside the first of the next
        ("1 GB/s", 4, 40 + 4 * 40),
        ("500 MB/s", 3, 3 * 80 + 40),  # the slow link below decides
        ("2 GB/s", 3, 20 + 3 * 40),  # the slow link above does
    ],
)
def test_copies_over_two_links_are_pipelined(bench: Any, rate: str, n: int, wait: int) -> None:
    timing = bench(three(bandwidth=rate), MODEL).batch(fetch=list(range(n)), fetch_hops=[2] * n)

    assert timing.wait == wait


def test_a_slice_from_the_second_tier_does_not_wait_for_those_below(bench: Any) -> None:
    """0 comes from below: nvme 0-40, then dram 40-80. 1 is in dram: 0-40."""
    assert bench(three(), MODEL).batch(fetch=[0, 1], fetch_hops=[2, 1]).wait == 80


@pytest.mark.parametrize(("second", "wait", "late"), [(29, 1, 1), (30, 0, 0), (31, 0, 0)])
def test_a_prefetch_over_two_links_lands_after_both(
    bench: Any, second: int, wait: int, late: int
) -> None:
    """Ordered at 10, it lands at 90; the next batch asks at 50 + 10 + its own dense part."""
    model = toy_header(layers=2, n_experts=16, top_k=4, dense_bytes=[10, second + 10])
    loaded = bench(three(), model)
    loaded.batch(hits=[0], prefetch=[16], prefetch_hops=[2])
    timing = loaded.batch(1, hits=[16])

    assert (timing.start + timing.dense, timing.wait, timing.late) == (60 + second, wait, late)


def test_a_prefetch_demanded_on_its_way_is_a_demand_on_the_next_link(bench: Any) -> None:
    """16 comes over the lower link from 10 to 50, and then waits for 18, which holds the upper one.

    Demanded at 60, it goes ahead of 19: from 90 to 130.
    """
    loaded = bench(three(), MODEL)
    loaded.batch(hits=[0], prefetch=[17, 16, 18, 19], prefetch_hops=[1, 2, 1, 1])
    timing = loaded.batch(1, hits=[16])

    assert (timing.start, timing.wait, timing.copy) == (50, 90 + 40 - 60, 90 + 40 - 60)


@pytest.mark.parametrize(
    ("hops", "dropped", "quiet"),
    [
        (
            [2, 2],
            80,
            10 + 80,
        ),  # 16 is on the lower link's way out at 50, 17 goes no further than dram
        ([1, 2], 40, 50),  # 16 lands at 50, 17 has reached dram
    ],
)
def test_a_prefetch_that_leaves_the_plan_stops_in_the_tier_below(
    bench: Any, hops: list[int], dropped: int, quiet: int
) -> None:
    loaded = bench(three(), MODEL)
    timing = loaded.batch(hits=[0], prefetch=[16, 17], prefetch_hops=hops, evicted=[16, 17])

    assert timing.end == 50
    assert timing.dropped == dropped
    assert loaded.machine.finish() == quiet


@pytest.mark.parametrize(
    ("lower", "withdrawn"), [("1 GB/s", [17]), ("500 MB/s", [17]), ("2 GB/s", [])]
)
def test_a_prefetch_is_cancelled_on_its_first_link_only(
    bench: Any, lower: str, withdrawn: list[int]
) -> None:
    loaded = bench(three(bandwidth=lower), MODEL)
    loaded.batch(hits=[0], prefetch=[16, 17], prefetch_hops=[2, 2])

    assert loaded.machine.cancel([16, 17]) == withdrawn


# -- the processor on the second tier


@pytest.mark.parametrize(("overhead", "end"), [("0 ns", 50), ("1 ns", 51), ("25 ns", 75)])
def test_a_missed_expert_is_computed_below_in_parallel(bench: Any, overhead: str, end: int) -> None:
    timing = bench(toy_profile(cpu={"overhead": overhead}), MODEL).batch(hits=[0], cpu=[1])

    assert (timing.experts, timing.end, timing.wait) == (40, end, end - 50)
    assert timing.copy == 0


def test_the_fast_tier_computes_longer_than_the_one_below(bench: Any) -> None:
    timing = bench(toy_profile(), MODEL).batch(hits=[0, 2, 3], cpu=[1])

    assert (timing.experts, timing.wait, timing.end) == (120, 0, 130)


def test_with_nothing_to_compute_the_main_processor_adds_nothing(bench: Any) -> None:
    profile = toy_profile(gpu={"overhead": "5 ns"}, cpu={"overhead": "3 ns"})
    timing = bench(profile, MODEL).batch(cpu=[1, 2])

    assert (timing.dense, timing.experts, timing.end) == (15, 0, 15 + 83)


@pytest.mark.parametrize(("hops", "ready"), [([0], 0), ([1], 40)])
def test_the_processor_below_waits_for_its_own_copies(
    bench: Any, hops: list[int], ready: int
) -> None:
    timing = bench(three(), MODEL).batch(hits=[0], cpu=[1], cpu_hops=hops)

    assert (timing.end, timing.copy) == (10 + ready + 40, ready)


def test_fetches_go_before_slices_for_the_processor_below(bench: Any) -> None:
    """Lower link: 0 10-50, 1 50-90. So 0 lands above at 90, and both compute until 130."""
    timing = bench(three(), MODEL).batch(fetch=[0], fetch_hops=[2], cpu=[1], cpu_hops=[1])

    assert (timing.end, timing.experts, timing.wait, timing.copy) == (130, 40, 80, 80)


# -- exclusive tiers


def test_a_demotion_runs_behind_the_batch_and_delays_nothing(bench: Any) -> None:
    profile = toy_profile(three={}, down={"bandwidth": "500 MB/s"})
    loaded = bench(profile, MODEL, exclusive=True)
    first = loaded.batch(fetch=[0], fetch_hops=[1], evicted=[1, 2], demoted=[1, 2])
    second = loaded.batch(0, fetch=[3], fetch_hops=[1])

    assert first.end == 90
    assert (second.wait, second.end) == (40, 180)
    assert loaded.machine.finish() == 90 + 2 * 80


def test_an_exclusive_slice_lives_in_one_tier_only(play: Any) -> None:
    """One expert fits above, one below: what leaves the top is found below; then it is gone."""
    model = toy_header(n_experts=4)
    trace = toy_trace(model, [[[e]] for e in (0, 1, 0, 2, 1)])
    seen = play(
        trace,
        toy_profile(three={}, down={}),
        capacity={"hbm": 40, "dram": 40},
        exclusive=True,
    )

    assert seen.column("misses") == [1, 1, 1, 1, 1]
    assert seen.column("lower_hits") == [
        0,
        0,
        1,
        0,
        0,
    ]  # 0 was demoted; then 1 and 0, of which 0 last
    assert seen.column("demoted_bytes") == [0, 40, 40, 40, 40]
    assert seen.column("lower_bytes") == [40, 40, 0, 40, 40]
    assert seen.column("wait_ns") == [80, 80, 40, 80, 80]


def test_an_inclusive_slice_stays_below(play: Any) -> None:
    trace = toy_trace(toy_header(n_experts=4), [[[e]] for e in (0, 1, 0, 2, 0)])
    seen = play(trace, three(), capacity={"hbm": 40, "dram": 80})

    assert seen.column("lower_hits") == [0, 0, 1, 0, 1]
    assert seen.column("lower_bytes") == [40, 40, 0, 40, 0]
    assert seen.metrics["lower_hit_rate"] == 2 / 5
    assert seen.metrics["lower_bytes"] == 120


def test_two_batches_that_end_together_are_two_groups(bench: Any) -> None:
    """Neither takes any time; the second copy counts the first, which started alone at 1 B/ns."""
    rows = [(1, "1 GB/s"), (2, "4 GB/s")]
    table = [{"size": "40 B", "lanes": lanes, "rate": rate} for lanes, rate in rows]
    profile = toy_profile(three={}, down={"bandwidth": table, "lanes": 2})
    loaded = bench(profile, toy_header(n_experts=16, dense_bytes=0), exclusive=True)
    for s in (0, 1):
        assert loaded.batch(evicted=[s], demoted=[s]).end == 0

    assert loaded.machine.finish() == 40
