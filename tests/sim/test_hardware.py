"""Hardware: what a profile must say, how long copies take, and how errors read."""

import math
import pickle
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from moetier.sim.hardware import Compute, Link, Profile, load_profile, profile_names
from moetier.sim.throughput import Point, Throughput, constant
from moetier.sim.units import ceil_div, transfer_ns
from moetier.sim.yaml_input import check, read_yaml
from moetier.traces.errors import InputError

TOY = """
name: toy
source: a test
tiers:
  hbm: {capacity: 24 GiB, bandwidth: 1008 GB/s, read_energy: 7.25 pJ/bit, source: a}
  dram: {capacity: 128 GiB, bandwidth: 60 GB/s, source: b}
links:
  - {src: dram, dst: hbm, bandwidth: 25 GB/s, latency: 10 us, energy: 5 pJ/bit, source: c}
compute:
  gpu: {tier: hbm, peak: {bf16: 165 TFLOP/s}, energy: 0.5 pJ/op, overhead: 2 us, source: d}
  cpu: {tier: dram, peak: 1 TFLOP/s, host_time_per_layer: 1 us, source: e}
static_power: 70 W
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def message(folder: Path, text: str) -> str:
    with pytest.raises(InputError) as caught:
        load_profile(write(folder, text))
    return str(caught.value).removeprefix(f"{folder / 'mine.yaml'}: ")


def toy() -> Profile:
    return Profile.model_validate(yaml.safe_load(TOY))


def test_units_become_integers(tmp_path: Path) -> None:
    profile = load_profile(write(tmp_path, TOY))

    assert profile == toy()
    assert profile.tiers["hbm"].capacity == 24 << 30
    assert profile.tiers["hbm"].read_energy == 58_000
    assert profile.tiers["dram"].bandwidth == 60 * 10**9
    assert profile.tiers["dram"].read_energy == profile.tiers["dram"].write_energy == 0
    assert profile.links[0].latency == 10_000
    assert profile.links[0].energy == 40_000
    assert profile.links[0].lanes == 1
    assert profile.compute["gpu"].overhead == 2000
    assert profile.compute["gpu"].energy == 500
    assert profile.compute["cpu"].host_time_per_layer == 1000
    assert profile.static_power == 70_000_000


def test_tiers_keep_their_order_and_the_first_processor_is_the_main_one() -> None:
    assert toy().tier_names == ("hbm", "dram")
    assert toy().main_compute is not None
    assert toy().main_compute.tier == "hbm"


def test_a_link_is_found_by_its_ends() -> None:
    profile = toy()

    assert profile.link("dram", "hbm") is profile.links[0]
    with pytest.raises(InputError, match="'toy' has no link hbm -> dram; known: dram -> hbm"):
        profile.link("hbm", "dram")


def test_a_profile_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        toy().name = "other"
    with pytest.raises(ValidationError, match="frozen"):
        toy().links[0].latency = 0


def test_the_peak_of_a_format() -> None:
    gpu, cpu = toy().compute["gpu"], toy().compute["cpu"]

    assert gpu.peak_of("bf16") == 165 * 10**12
    assert cpu.peak_of("bf16") == cpu.peak_of("int8") == 10**12
    with pytest.raises(InputError) as caught:
        gpu.peak_of("int8")
    assert str(caught.value) == (
        "no peak for 'int8' on the processor of tier 'hbm'; add it to its `peak`; known: bf16"
    )


def test_a_peak_for_any_other_format() -> None:
    compute = Compute.model_validate(
        {"tier": "hbm", "peak": {"any": "1 TOP/s", "int8": "2 TOPS"}, "source": "x"}
    )

    assert compute.peak_of("int8") == 2 * compute.peak_of("bf16") == 2 * 10**12


def test_what_is_dumped_reads_back_the_same() -> None:
    for profile in (toy(), load_profile("phone-ufs4"), load_profile("desktop-nvme")):
        text = yaml.safe_dump(profile.model_dump(mode="json"), sort_keys=False)

        assert Profile.model_validate(yaml.safe_load(text)) == profile


def test_a_dump_writes_a_plain_rate_and_a_plain_peak_as_they_were_given() -> None:
    dump = toy().model_dump(mode="json")

    assert dump["links"][0]["bandwidth"] == "25 GB/s"
    assert dump["compute"]["cpu"]["peak"] == "1 TOP/s"
    assert dump["compute"]["gpu"]["peak"] == {"bf16": "165 TOP/s"}


def test_a_profile_survives_a_trip_between_processes() -> None:
    profile = load_profile("phone-ufs4")
    profile.links[0].copy_ns(1 << 20, 2)

    assert pickle.loads(pickle.dumps(profile)) == profile


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "25 GB/s",
            "25e9",
            "links.0.bandwidth: expected a rate such as '25 GB/s', got '25e9'",
        ),
        (
            "25 GB/s",
            "25000000000",
            "links.0.bandwidth: expected a rate such as '25 GB/s', got 25000000000",
        ),
        ("1008 GB/s", "0 GB/s", "tiers.hbm.bandwidth: must be above zero, got 0"),
        ("25 GB/s", "0 GB/s", "links.0.bandwidth: must be above zero, got 0"),
        ("24 GiB", "0 GiB", "tiers.hbm.capacity: must be above zero, got 0"),
        ("1 TFLOP/s", "0 TFLOP/s", "compute.cpu.peak: must be above zero, got 0"),
        ("24 GiB", "-24 GiB", "tiers.hbm.capacity: a size cannot be negative, got '-24 GiB'"),
        ("25 GB/s", "-1 GB/s", "links.0.bandwidth: a rate cannot be negative, got '-1 GB/s'"),
        (
            "165 TFLOP/s",
            "165",
            "compute.gpu.peak.bf16: expected a compute rate such as '155 TFLOP/s', got 165",
        ),
        (
            "1 TFLOP/s",
            "1",
            "compute.cpu.peak: expected a compute rate such as '155 TFLOP/s', got 1",
        ),
        (
            "70 W",
            "70 J",
            "static_power: expected a power such as '70 W', got '70 J'; "
            "its units are uW, mW, W, kW, µW",
        ),
        (
            "{capacity: 24",
            "{capcity: 24",
            "tiers.hbm.capcity: unknown key; did you mean 'capacity'? "
            "known: source, capacity, bandwidth, read_energy, write_energy",
        ),
        (
            "compute:\n",
            "fans: 3\ncompute:\n",
            "fans: unknown key; known: "
            "name, source, tiers, links, compute, static_power, notes, identity",
        ),
        ("source: a test\n", "", "source: this key is missing"),
        (", source: c", "", "links.0.source: this key is missing"),
        ("latency: 10 us", "lanes: 0", "links.0.lanes: Input should be greater than or equal to 1"),
        ("src: dram", "src: ram", "links.0.src: no tier 'ram'; its tiers are hbm, dram"),
        ("dst: hbm", "dst: gpu", "links.0.dst: no tier 'gpu'; its tiers are hbm, dram"),
        ("tier: hbm", "tier: vram", "compute.gpu.tier: no tier 'vram'; its tiers are hbm, dram"),
        ("dst: hbm", "dst: dram", "links.0: leads from 'dram' to itself; name two tiers"),
        (
            "src: dram, dst: hbm",
            "src: hbm, dst: dram",
            "links: none from 'dram' to the next faster tier 'hbm'; add one",
        ),
        (
            "60 GB/s",
            "2 TB/s",
            "tiers: 'dram' is faster than 'hbm'; list the fastest first",
        ),
        ("{bf16: 165 TFLOP/s}", "{}", "compute.gpu.peak: Dictionary should have at least 1 item"),
        (
            "static_power: 70 W",
            "static_power: 70 W\nname: again",
            "line 13: key 'name' is given twice; the first is on line 2; keep one",
        ),
        (
            "static_power: 70 W",
            "identity: {gpu: A, gpu: B}",
            "line 12: key 'gpu' is given twice; the first is on line 12; keep one",
        ),
        ("tiers:", "tiers: [", "line 6: not valid YAML: expected ',' or ']'"),
    ],
)
def test_an_error_names_the_key_the_value_and_the_way_out(
    tmp_path: Path, old: str, new: str, expected: str
) -> None:
    assert TOY.count(old) >= 1

    assert message(tmp_path, TOY.replace(old, new, 1)).startswith(expected)


def test_a_link_given_twice(tmp_path: Path) -> None:
    row = next(line for line in TOY.splitlines() if "src: dram" in line)

    assert message(tmp_path, TOY.replace(row, f"{row}\n{row}")) == (
        "links.1: dram -> hbm is given twice; keep one"
    )


def test_a_misspelt_key_comes_before_the_key_it_leaves_missing(tmp_path: Path) -> None:
    table = "[{size: 1 MiB, rat: 2 GB/s}, {size: 1, rate: 2 GB/s}]"

    assert message(tmp_path, TOY.replace("25 GB/s", table)) == (
        "links.0.bandwidth.0.rat: unknown key; did you mean 'rate'? known: size, lanes, rate"
    )


def test_how_many_errors_there_are(tmp_path: Path) -> None:
    text = TOY.replace("24 GiB", "24").replace("70 W", "70").replace("10 us", "10")

    assert message(tmp_path, text) == (
        "tiers.hbm.capacity: expected a size such as '24 GiB', got 24; and 2 more in this file"
    )


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("[]", "links.0.bandwidth: a table needs at least one row of size, lanes and rate"),
        ("[{size: 1 MiB, rate: 25e9}]", "links.0.bandwidth.0.rate: expected a rate such as"),
        ("[{size: 0 B, rate: 1 GB/s}]", "links.0.bandwidth.0.size: must be above zero, got 0"),
        ("[{size: 1 B, rate: 0 GB/s}]", "links.0.bandwidth.0.rate: must be above zero, got 0"),
        ("[{size: 1 B, rate: 1 B/s, lanes: 0}]", "links.0.bandwidth.0.lanes: Input should be"),
        (
            "[{size: 1 KiB, rate: 1 B/s}, {size: 1024 B, rate: 2 B/s}]",
            "links.0.bandwidth: two rows for 1024 B with 1 lanes; keep one",
        ),
        ("{size: 1 B, rate: 1 B/s}", "links.0.bandwidth: expected a rate such as '25 GB/s', got {"),
    ],
)
def test_errors_in_a_table_name_the_row(tmp_path: Path, table: str, expected: str) -> None:
    assert message(tmp_path, TOY.replace("25 GB/s", table)).startswith(expected)


def test_a_file_that_is_not_a_mapping(tmp_path: Path) -> None:
    keys = "its keys are name, source, tiers, links, compute, static_power, notes, identity"

    assert message(tmp_path, "") == f"expected a mapping of keys, got NoneType; {keys}"
    assert message(tmp_path, "- a") == f"expected a mapping of keys, got list; {keys}"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(InputError, match=r"binary\.yaml: is not a text file in UTF-8"):
        load_profile(binary)
    with pytest.raises(InputError, match=r"none\.yaml: cannot be read: No such file"):
        load_profile(str(tmp_path / "none.yaml"))
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        load_profile(tmp_path)
    assert message(tmp_path, "a: \x07").startswith("not valid YAML: ")
    assert message(tmp_path, "{[1]: 2}").startswith("line 1: not valid YAML: ")


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        load_profile("rtx-a600")

    assert str(caught.value) == (
        "unknown hardware 'rtx-a600'; did you mean 'rtx-a6000'? "
        f"known: {', '.join(profile_names())}; or give the path of a YAML file"
    )
    with pytest.raises(InputError, match="unknown hardware 'abacus'; known: "):
        load_profile("abacus")


def test_unknown_keys_below_what_the_schema_describes() -> None:
    class Inner(BaseModel, extra="forbid"):
        a: int = 0

    class Outer(BaseModel, extra="forbid"):
        one: Inner | None = None
        many: dict[str, list[Inner]] = {}
        rows: tuple[Inner, ...] = ()
        plain: list[int] = []

    for data, expected in [
        ({"one": {"b": 1}}, "one.b: unknown key; known: a"),
        ({"many": {"x": [{}, {"aa": 1}]}}, "many.x.1.aa: unknown key; did you mean 'a'? known: a"),
        ({"rows": [{"b": 1}]}, "rows.0.b: unknown key; known: a"),
        ({"plain": ["x"]}, "plain.0: Input should be a valid integer, unable to parse string"),
    ]:
        with pytest.raises(InputError) as caught:
            check(Outer, data, where="here")
        assert str(caught.value).startswith(f"here: {expected}")


def test_yaml_aliases_and_merges_still_work(tmp_path: Path) -> None:
    text = "base: &base {a: 1, b: 2}\nmine: {<<: *base, b: 3}\nlist: [*base, *base]\n"

    read = read_yaml(write(tmp_path, text))

    assert read["mine"] == {"a": 1, "b": 3}
    assert read["list"] == [{"a": 1, "b": 2}] * 2


# --- time -------------------------------------------------------------------------------------


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
