"""Units: strings to integers, rounded up once, and back."""

from collections.abc import Callable
from decimal import ROUND_CEILING, Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from moetier.sim import units
from moetier.sim.units import (
    Bytes,
    EnergyPerByte,
    EnergyPerOp,
    Ops,
    Power,
    Rate,
    Share,
    Time,
    ceil_div,
    format_bytes,
    format_ns,
    format_rate,
    parse_bytes,
    parse_energy_per_byte,
    parse_energy_per_op,
    parse_ops,
    parse_percent,
    parse_power,
    parse_rate,
    parse_share,
    parse_time,
    transfer_ns,
)
from moetier.traces.errors import InputError

Parse = Callable[[object], int | Fraction]

PARSERS: list[tuple[Parse, str]] = [
    (parse_bytes, "24 GiB"),
    (parse_rate, "25 GB/s"),
    (parse_time, "10 us"),
    (parse_ops, "155 TFLOP/s"),
    (parse_energy_per_byte, "1.5 pJ/bit"),
    (parse_energy_per_op, "0.5 pJ/op"),
    (parse_power, "70 W"),
    (parse_share, "25 %"),
]


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (parse_bytes, "24 GiB", 24 << 30),
        (parse_bytes, "1 TiB", 1 << 40),
        (parse_bytes, "2MiB", 2 << 20),
        (parse_bytes, "4 KiB", 4096),
        (parse_bytes, "1.935 MB", 1_935_000),
        (parse_bytes, " 7 kB ", 7000),
        (parse_bytes, "0 B", 0),
        (parse_bytes, ".5 GB", 500_000_000),
        (parse_bytes, "2 TB", 2 * 10**12),
        (parse_rate, "25.1 GB/s", 25_100_000_000),
        (parse_rate, "1810 MiB/s", 1810 << 20),
        (parse_rate, "10 Gbps", 1_250_000_000),
        (parse_rate, "104 Gbit/s", 13_000_000_000),
        (parse_rate, "8 kbit/s", 1000),
        (parse_time, "10 us", 10_000),
        (parse_time, "2.21 ms", 2_210_000),
        (parse_time, "1.5 µs", 1500),
        (parse_time, "1.5 μs", 1500),
        (parse_time, "1 min", 60 * 10**9),
        (parse_time, "3 ns", 3),
        (parse_ops, "155 TFLOP/s", 155 * 10**12),
        (parse_ops, "16.4 TOPS", 16_400_000_000_000),
        (parse_ops, "1 PFLOPS", 10**15),
        (parse_ops, "65 GOP/s", 65 * 10**9),
        (parse_energy_per_byte, "1.5 pJ/bit", 12_000),
        (parse_energy_per_byte, "103 pJ/bit", 824_000),
        (parse_energy_per_byte, "12 pJ/byte", 12_000),
        (parse_energy_per_byte, "1 nJ/B", 10**6),
        (parse_energy_per_op, "0.314 pJ/op", 314),
        (parse_energy_per_op, "0.52 pJ/FLOP", 520),
        (parse_energy_per_op, "0.45 pJ/MAC", 225),
        (parse_power, "70 W", 70_000_000),
        (parse_power, "0.46 W", 460_000),
        (parse_power, "3 mW", 3000),
        (parse_power, "1 kW", 10**9),
        (parse_share, "25 %", Fraction(1, 4)),
        (parse_share, "17.8 %", Fraction(178, 1000)),
        (parse_share, "100%", Fraction(1)),
        (parse_share, "0 %", Fraction(0)),
    ],
)
def test_known_values(parse: Parse, text: str, expected: int | Fraction) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize("bare", ["25e9", "25", "", "25.", 25, 25.0, None, True, [], {"a": 1}])
@pytest.mark.parametrize(("parse", "example"), PARSERS)
def test_a_bare_number_is_refused_and_told_what_is_expected(
    parse: Parse, example: str, bare: object
) -> None:
    with pytest.raises(InputError) as caught:
        parse(bare)

    assert f"such as '{example}', got {bare!r}" in str(caught.value)


@pytest.mark.parametrize(("parse", "example"), PARSERS)
def test_a_negative_value_is_refused(parse: Parse, example: str) -> None:
    with pytest.raises(InputError, match=f"cannot be negative, got '-{example}'"):
        parse(f"-{example}")


@pytest.mark.parametrize(
    ("parse", "wrong"),
    [
        (parse_bytes, "3 gib"),
        (parse_bytes, "3 GB/s"),
        (parse_bytes, "3 GB GB"),
        (parse_bytes, "1e3 B"),
        (parse_rate, "25 gb/s"),
        (parse_rate, "25 GB"),
        (parse_time, "10 sec"),
        (parse_time, "12:30"),
        (parse_ops, "155 TFLOP"),
        (parse_energy_per_byte, "1.5 pJ"),
        (parse_energy_per_op, "1.5 pJ/bit"),
        (parse_power, "70 J"),
        (parse_share, "25 percent"),
    ],
)
def test_an_unknown_unit_is_refused_with_the_known_ones(parse: Parse, wrong: str) -> None:
    with pytest.raises(InputError, match="its units are ") as caught:
        parse(wrong)

    assert repr(wrong) in str(caught.value)


def test_the_messages_in_full() -> None:
    with pytest.raises(InputError) as caught:
        parse_rate("25e9")

    assert str(caught.value) == "expected a rate such as '25 GB/s', got '25e9'"

    with pytest.raises(InputError) as caught:
        parse_time("3 days")

    assert str(caught.value) == (
        "expected a time such as '10 us', got '3 days'; its units are ns, us, ms, s, µs, μs, min"
    )


def test_a_percentage_may_be_above_the_whole() -> None:
    assert parse_percent("250 %") == Fraction(5, 2)
    assert parse_percent("0 %") == 0
    with pytest.raises(InputError, match="a share cannot be negative, got '-1 %'"):
        parse_percent("-1 %")


def test_a_share_above_the_whole_is_refused() -> None:
    with pytest.raises(InputError, match=r"cannot be above 100 %, got '100\.1 %'"):
        parse_share("100.1 %")


decimals = st.decimals(min_value=0, max_value=10**6, places=9, allow_nan=False)


@given(decimals)
def test_conversion_rounds_up_once(number: Decimal) -> None:
    text = f"{number:f}"
    exact = Decimal(text) * 2**30

    assert parse_bytes(f"{text} GiB") == int(exact.to_integral_value(ROUND_CEILING))
    assert 0 <= parse_bytes(f"{text} GiB") - Fraction(text) * 2**30 < 1


@given(decimals)
def test_one_value_in_two_units_is_one_integer(number: Decimal) -> None:
    text, scaled = f"{number:f}", f"{number * 8:f}"

    assert parse_energy_per_byte(f"{text} pJ/bit") == parse_energy_per_byte(f"{scaled} pJ/byte")
    assert parse_rate(f"{text} GB/s") == parse_rate(f"{scaled} Gbit/s")
    assert parse_time(f"{text} ms") == parse_time(f"{number * 1000:f} us")


def test_floats_would_have_gone_wrong_here() -> None:
    assert parse_time("10 us") == 10_000
    assert 10 * 1e-6 != 1e-5
    assert parse_bytes("0.1 GB") + parse_bytes("0.2 GB") == parse_bytes("0.3 GB")


@given(st.integers(0, 10**6), st.integers(0, 10**12))
def test_power_times_time_is_exact_in_femtojoules(milliwatts: int, ns: int) -> None:
    joules = Fraction(milliwatts, 1000) * Fraction(ns, 10**9)

    assert parse_power(f"{milliwatts} mW") * ns == joules * 10**15


class Everything(BaseModel):
    """One field of each type."""

    size: Bytes
    rate: Rate
    time: Time
    ops: Ops
    per_byte: EnergyPerByte
    per_op: EnergyPerOp
    power: Power
    share: Share


EXAMPLES = {
    "size": "24 GiB",
    "rate": "25100 MB/s",
    "time": "10 us",
    "ops": "155 TOP/s",
    "per_byte": "12 pJ/byte",
    "per_op": "314 fJ/op",
    "power": "70 W",
    "share": "17.8 %",
}


def test_a_schema_parses_at_the_edge_and_dumps_what_it_read() -> None:
    read = Everything.model_validate(EXAMPLES)

    assert read.size == 24 << 30
    assert read.share == Fraction(178, 1000)
    assert read.model_dump()["power"] == 70_000_000
    assert read.model_dump(mode="json") == EXAMPLES


counts = st.integers(0, 10**18)


@given(counts, counts, counts, counts, counts, counts, counts, st.decimals(0, 100, places=6))
def test_what_is_dumped_reads_back_the_same(
    size: int,
    rate: int,
    time: int,
    ops: int,
    per_byte: int,
    per_op: int,
    power: int,
    share: Decimal,
) -> None:
    first = Everything.model_construct(
        size=size,
        rate=rate,
        time=time,
        ops=ops,
        per_byte=per_byte,
        per_op=per_op,
        power=power,
        share=Fraction(share) / 100,
    )

    assert Everything.model_validate(first.model_dump(mode="json")) == first


def test_a_schema_names_the_key() -> None:
    with pytest.raises(ValidationError) as caught:
        Everything.model_validate(EXAMPLES | {"rate": 25_000_000_000})

    assert caught.value.errors()[0]["loc"] == ("rate",)
    assert "such as '25 GB/s', got 25000000000" in caught.value.errors()[0]["msg"]


@pytest.mark.parametrize("integer", [0, 1, 24 << 30])
def test_an_integer_has_no_unit_and_is_refused_in_a_schema(integer: int) -> None:
    with pytest.raises(ValidationError, match="expected a size"):
        Everything.model_validate(EXAMPLES | {"size": integer})


@given(st.integers(-(10**30), 10**30), st.integers(1, 10**18))
def test_ceil_div(numerator: int, denominator: int) -> None:
    quotient = ceil_div(numerator, denominator)

    assert (quotient - 1) * denominator < numerator <= quotient * denominator


@pytest.mark.parametrize(
    ("nbytes", "rate", "expected"),
    [(0, 1, 0), (1, 10**9, 1), (1, 10**10, 1), (25, 25 * 10**9, 1), (10**9, 1, 10**18)],
)
def test_transfer_ns(nbytes: int, rate: int, expected: int) -> None:
    assert transfer_ns(nbytes, rate) == expected


def test_an_expert_of_qwen3_over_pcie_4() -> None:
    # 9.437 MB at 25.1 GB/s is 376 us; 384 of them are the 144 ms of arXiv 2603.19289's A6000.
    one = transfer_ns(3 * 2048 * 768 * 2, parse_rate("25.1 GB/s"))

    assert one == 375_984
    assert 384 * one // 10**6 == 144


@pytest.mark.parametrize(
    ("show", "value", "expected"),
    [
        (format_bytes, 0, "0 B"),
        (format_bytes, 1023, "1023 B"),
        (format_bytes, 1024, "1 KiB"),
        (format_bytes, 1_935_360, "1.85 MiB"),
        (format_bytes, 24 << 30, "24 GiB"),
        (format_bytes, 100 << 40, "100 TiB"),
        (format_bytes, 9999 << 40, "9999 TiB"),
        (format_ns, 999, "999 ns"),
        (format_ns, 2_210_000, "2.21 ms"),
        (format_ns, 99_940, "99.9 us"),
        (format_ns, 99_960, "100 us"),
        (format_ns, 999_499, "999 us"),
        (format_ns, 999_999, "1 ms"),
        (format_ns, 120 * 10**9, "120 s"),
        (format_ns, -1500, "-1.5 us"),
        (format_rate, 25_100_000_000, "25.1 GB/s"),
        (format_rate, 4_800_000_000_000, "4.8 TB/s"),
    ],
)
def test_formats_for_reading(show: Callable[[int], str], value: int, expected: str) -> None:
    assert show(value) == expected


@given(st.integers(1, 2**52))
def test_what_is_shown_is_close_and_can_be_read(value: int) -> None:
    for show, parse in [
        (format_bytes, parse_bytes),
        (format_ns, parse_time),
        (format_rate, parse_rate),
    ]:
        assert abs(parse(show(value)) - value) * 200 <= value + 200


def test_every_parser_says_what_it_returns() -> None:
    for parse, _ in PARSERS:
        assert (parse.__doc__ or "").startswith("Return ")
        assert parse.__name__ in vars(units)
