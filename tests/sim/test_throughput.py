"""Tests of links: what a transfer takes, by its size and the lanes that are busy."""

import math
from fractions import Fraction
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetier.sim.hardware import Link, load_profile
from moetier.sim.throughput import Point, Throughput, constant
from moetier.sim.units import ceil_div, transfer_ns


def link(bandwidth: Any, **more: Any) -> Link:
    ends = {"src": "dram", "dst": "hbm", "source": "x"}
    return Link.model_validate(ends | {"bandwidth": bandwidth} | more)


def test_a_plain_rate_is_the_total_whatever_the_lanes() -> None:
    plain = link("25 GB/s", latency="10 us", lanes=4)

    assert plain.copy_ns(25_000) == 10_000 + 1000
    assert plain.copy_ns(25_000, 1) == 10_000 + 1000
    assert plain.copy_ns(25_000, 4) == 10_000 + 4000
    assert plain.copy_ns(0, 4) == 10_000
    assert plain.copy_ns(1) == 10_001


sizes = st.integers(0, 1 << 40)
rates = st.integers(1, 10**13)


@given(sizes, rates, st.integers(1, 64), st.integers(0, 10**6))
def test_copy_time_is_latency_plus_an_equal_share(n: int, rate: int, k: int, latency: int) -> None:
    plain = link(f"{rate} B/s", latency=f"{latency} ns")

    assert plain.copy_ns(n, k) == latency + transfer_ns(n * k, rate)


@given(sizes, sizes, rates, st.integers(1, 8))
def test_more_bytes_never_take_less_time(a: int, b: int, rate: int, active: int) -> None:
    plain = link(f"{rate} B/s")

    assert plain.copy_ns(min(a, b), active) <= plain.copy_ns(max(a, b), active)


@given(sizes, rates, rates)
def test_more_bandwidth_is_never_slower(nbytes: int, a: int, b: int) -> None:
    slow, fast = (link(f"{rate} B/s") for rate in sorted((a, b)))

    assert fast.copy_ns(nbytes) <= slow.copy_ns(nbytes)


@pytest.mark.parametrize("active", [0, -1])
def test_a_transfer_keeps_a_lane_busy(active: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1 lane busy, got active={active}"):
        link("1 B/s").copy_ns(1, active)


MIB = 1 << 20
MEASURED = {  # O_DIRECT random reads, MiB/s, Helldez/BigMoeOnEdge: (size, lanes) -> rate
    (4 * MIB, 1): 1810,
    (4 * MIB, 2): 2460,
    (4 * MIB, 4): 2458,
    (MIB // 8, 2): 954,
    (MIB // 4, 2): 1536,
    (MIB // 2, 2): 1882,
    (MIB, 2): 2085,
    (2 * MIB, 2): 2044,
    (8 * MIB, 2): 2529,
    (MIB // 8, 4): 1486,
    (MIB // 4, 4): 2099,
    (MIB // 2, 4): 2114,
    (MIB, 4): 2235,
    (2 * MIB, 4): 2155,
    (8 * MIB, 4): 2558,
}


@pytest.mark.parametrize(("size", "lanes"), MEASURED)
def test_the_phone_meets_its_measured_points(size: int, lanes: int) -> None:
    flash = load_profile("phone-ufs4").link("flash", "dram")
    rate = MEASURED[size, lanes] * MIB

    assert flash.bandwidth.total(size, lanes) == rate
    assert flash.copy_ns(size, lanes) == transfer_ns(size * lanes, rate)


def test_the_phone_meets_its_measured_latency() -> None:
    # The same source gives 2.21, 3.25 and 6.50 ms for 4 MiB with 1, 2 and 4 lanes.
    flash = load_profile("phone-ufs4").link("flash", "dram")

    assert [round(flash.copy_ns(4 * MIB, lanes) / 1e6, 2) for lanes in (1, 2, 4)] == [
        2.21,
        3.25,
        6.51,
    ]


@given(st.integers(1, 1 << 26), st.integers(0, 1 << 22), st.integers(1, 6))
def test_on_the_phone_more_bytes_never_take_less_time(size: int, more: int, active: int) -> None:
    flash = load_phone()

    assert flash.copy_ns(size, active) <= flash.copy_ns(size + more, active)
    assert flash.copy_ns(size, active) <= flash.copy_ns(size + 1, active)


@lru_cache
def load_phone() -> Link:
    return load_profile("phone-ufs4").link("flash", "dram")


TABLE = [
    {"size": "1 MiB", "lanes": 1, "rate": "1000 B/s"},
    {"size": "4 MiB", "lanes": 1, "rate": "2000 B/s"},
    {"size": "1 MiB", "lanes": 4, "rate": "4000 B/s"},
    {"size": "4 MiB", "lanes": 4, "rate": "5000 B/s"},
]


@pytest.mark.parametrize(
    ("size", "active", "expected"),
    [
        (MIB, 1, 1000),
        (2 * MIB, 1, 1500),  # half way in log2
        (4 * MIB, 1, 2000),
        (MIB, 2, 2000),  # a third of the way from 1 lane to 4
        (MIB, 3, 3000),
        (2 * MIB, 3, 3500),
        (MIB // 64, 1, 1000),  # beyond the ends it stays at the end
        (1, 4, 4000),
        (0, 1, 1000),
        (64 * MIB, 1, 2000),
        (64 * MIB, 32, 5000),
    ],
)
def test_interpolation_in_log2_of_size_and_in_lanes(size: int, active: int, expected: int) -> None:
    table = link(TABLE, lanes=4, latency="7 ns")

    assert table.bandwidth.total(size, active) == expected
    assert table.copy_ns(size, active) == 7 + transfer_ns(size * active, expected)


def test_the_order_of_the_rows_does_not_matter() -> None:
    forward, backward = link(TABLE), link(TABLE[::-1])

    for size in (MIB, 3 * MIB, 5 * MIB // 2, 12345):
        assert forward.bandwidth.total(size, 3) == backward.bandwidth.total(size, 3)


@given(st.integers(MIB, 4 * MIB))
def test_the_logarithm_is_right_to_many_digits(size: int) -> None:
    expected = 1000 + 500 * math.log2(size / MIB)

    assert math.isclose(link(TABLE).bandwidth.total(size, 1), expected, rel_tol=1e-9)


@given(
    st.lists(st.integers(1, 1 << 30), min_size=2, max_size=6, unique=True),
    st.lists(st.integers(1, 10**11), min_size=6, max_size=6),
    st.integers(1, 1 << 32),
    st.integers(1, 10),
)
def test_interpolation_stays_between_its_points(
    points: list[int], speeds: list[int], size: int, active: int
) -> None:
    rows = [
        Point.model_construct(size=point, lanes=1 + i % 3, rate=rate)
        for i, (point, rate) in enumerate(zip(points, speeds, strict=False))
    ]
    table = Throughput(tuple(rows))

    assert min(r.rate for r in rows) <= table.total(size, active) <= table.peak
    for row in rows:
        assert table.total(row.size, row.lanes) == row.rate


@given(
    st.integers(1, 1 << 20),
    st.lists(st.integers(50, 169), min_size=1, max_size=8),
    st.integers(1, 1 << 28),
    st.integers(0, 1 << 20),
)
def test_time_rises_where_rates_rise_by_at_most_69_percent_per_doubling(
    start: int, steps: list[int], size: int, more: int
) -> None:
    # n / R(n) rises while R' < R / n; per doubling, R may grow by ln 2 = 69 % of itself.
    rate, rows = 10**9, [Point.model_construct(size=start, lanes=1, rate=10**9)]
    for i, step in enumerate(steps, start=1):
        rate = rate * step // 100
        rows.append(Point.model_construct(size=start << i, lanes=1, rate=rate))
    table = Throughput(tuple(rows))

    def ns(n: int) -> int:
        return ceil_div(n * 10**9, 1) * table.total(n, 1).denominator // table.total(n, 1).numerator

    assert ns(size) <= ns(size + more)


def test_throughput_compares_by_its_points() -> None:
    assert constant(5) == constant(5)
    assert hash(constant(5)) == hash(constant(5))
    assert constant(5) != constant(6)
    assert constant(5) != 5
    assert repr(constant(5)) == "Throughput(1 points, peak 5 B/s)"
    assert constant(7).total(123, 4) == Fraction(7)


def test_a_throughput_can_be_given_ready_made() -> None:
    assert link(constant(10**9)).copy_ns(10) == 10
