"""This module turns strings with units into integers, and integers back into strings.

Units are required: a bare number for a rate is a trap (PyYAML reads `25e9` as a string). All
arithmetic is exact, and a conversion rounds up once, at its end. One microwatt for one nanosecond
is one femtojoule, so power times time needs no rounding.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

from moetier.traces.errors import InputError

_TEXT = re.compile(r"\s*([+-]?)(\d+(?:\.\d*)?|\.\d+)\s*(.*?)\s*", re.DOTALL)


@dataclass(frozen=True)
class Quantity:
    """A kind of quantity: its *units*, each as a multiple of what the integer counts.

    *aliases* are units that are understood but never written.
    """

    name: str
    example: str
    units: dict[str, Fraction]
    aliases: dict[str, Fraction] = field(default_factory=dict)

    def exact(self, text: object) -> Fraction:
        """Return *text* in the integer's unit, not rounded; raise `InputError` if it is not one."""
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        scale = (self.units | self.aliases).get(match[3]) if match else None
        if match is None or scale is None:
            wrong_unit = match is not None and match[3].strip("0123456789eE+-.")
            way_out = f"its units are {', '.join(self.units | self.aliases)}" if wrong_unit else ""
            raise InputError(
                f"expected {self.name} such as '{self.example}', got {text!r}", way_out=way_out
            )
        if match[1] == "-":
            raise InputError(f"{self.name} cannot be negative, got {text!r}")
        return Fraction(match[2]) * scale

    def parse(self, text: object) -> int:
        """Return *text* as an integer, rounded up; raise `InputError` if it is not one."""
        value = self.exact(text)
        return ceil_div(value.numerator, value.denominator)

    def spell(self, value: int) -> str:
        """Write *value* exactly, in the largest unit that divides it; `parse` reads it back."""
        fitting = [u for u, scale in self.units.items() if not value % scale and value >= scale]
        unit = max(fitting, key=self.units.__getitem__, default=next(iter(self.units)))
        return f"{value // self.units[unit]} {unit}"

    def show(self, value: int, units: tuple[str, ...]) -> str:
        """Write *value* to three significant digits in the best of *units* (ascending)."""
        unit = units[0]
        for larger in units[1:]:
            # 0.9995 is where three digits would read "1000" in the smaller unit.
            if abs(value) >= self.units[larger] * Fraction(1999, 2000):
                unit = larger
        number = Fraction(value) / self.units[unit]
        digits = 0 if abs(number) >= Fraction(1999, 20) else 1 if abs(number) >= 10 else 2
        shown = f"{round(number)}" if not digits else f"{float(round(number, digits)):.{digits}f}"
        return f"{shown.rstrip('0').rstrip('.') if '.' in shown else shown} {unit}"


def _metric(suffix: str, prefixes: str, one: Fraction | int = 1) -> dict[str, Fraction]:
    """Return units such as kB, MB: each letter of *prefixes* a thousand times the one before."""
    return {f"{p.strip()}{suffix}": Fraction(one) * 1000**i for i, p in enumerate(prefixes)}


_BINARY = {f"{p}iB": Fraction(1024) ** i for i, p in enumerate("KMGT", start=1)}
_BYTES = Quantity("a size", "24 GiB", _metric("B", " kMGT") | _BINARY)
_RATES = Quantity(
    "a rate",
    "25 GB/s",
    {f"{unit}/s": scale for unit, scale in _BYTES.units.items()},
    _metric("bit/s", "kMGT", 125) | _metric("bps", "kMGT", 125),
)
_TIMES = Quantity(
    "a time",
    "10 us",
    {"ns": Fraction(1), "us": Fraction(10**3), "ms": Fraction(10**6), "s": Fraction(10**9)},
    {"µs": Fraction(10**3), "μs": Fraction(10**3), "min": Fraction(60 * 10**9)},
)
_OPS = Quantity(
    "a compute rate",
    "155 TFLOP/s",
    _metric("OP/s", " kMGTP"),
    _metric("FLOP/s", " kMGTP") | _metric("FLOPS", " kMGTP") | _metric("OPS", " kMGTP"),
)
_ENERGIES_PER_BYTE = Quantity(
    "an energy per bit or byte",
    "1.5 pJ/bit",
    _metric("J/byte", "fpn") | _metric("J/bit", "fpn", 8),
    _metric("J/B", "fpn"),
)
_ENERGIES_PER_OP = Quantity(
    "an energy per operation",
    "0.5 pJ/op",
    _metric("J/op", "fpn"),
    _metric("J/FLOP", "fpn") | _metric("J/MAC", "fpn", Fraction(1, 2)),  # a MAC is two operations
)
_POWERS = Quantity(
    "a power",
    "70 W",
    _metric("W", "um") | {"W": Fraction(10**6)},
    {"kW": Fraction(10**9), "µW": Fraction(1)},
)
_SHARES = Quantity("a share", "25 %", {"%": Fraction(1, 100)})


def parse_bytes(text: object) -> int:
    """Return a size such as "24 GiB" in bytes; raise `InputError` unless it has a unit."""
    return _BYTES.parse(text)


def parse_rate(text: object) -> int:
    """Return a rate such as "25 GB/s" or "10 Gbit/s" in bytes per second; else `InputError`."""
    return _RATES.parse(text)


def parse_time(text: object) -> int:
    """Return a time such as "10 us" in nanoseconds; raise `InputError` unless it has a unit."""
    return _TIMES.parse(text)


def parse_ops(text: object) -> int:
    """Return a compute rate ("155 TFLOP/s", "16.4 TOPS") in operations per second."""
    return _OPS.parse(text)


def parse_energy_per_byte(text: object) -> int:
    """Return an energy such as "1.5 pJ/bit" or "12 pJ/byte" in femtojoules per byte."""
    return _ENERGIES_PER_BYTE.parse(text)


def parse_energy_per_op(text: object) -> int:
    """Return an energy such as "0.5 pJ/op" in femtojoules; a MAC counts as two operations."""
    return _ENERGIES_PER_OP.parse(text)


def parse_power(text: object) -> int:
    """Return a power such as "70 W" in microwatts; times nanoseconds it gives femtojoules."""
    return _POWERS.parse(text)


def parse_share(text: object) -> Fraction:
    """Return a share such as "25 %" as an exact fraction from 0 to 1; else raise `InputError`."""
    share = _SHARES.exact(text)
    if share > 1:
        raise InputError(f"a share cannot be above 100 %, got {text!r}")
    return share


def parse_percent(text: object) -> Fraction:
    """Return how much more, such as "120 %", as an exact fraction that may exceed 1."""
    return _SHARES.exact(text)


def ceil_div(numerator: int, denominator: int) -> int:
    """Return *numerator* / *denominator*, rounded up."""
    return -(-numerator // denominator)


def transfer_ns(nbytes: int, bytes_per_s: int) -> int:
    """Return how long *nbytes* take at *bytes_per_s*, in nanoseconds, rounded up."""
    return ceil_div(nbytes * 10**9, bytes_per_s)


def format_bytes(nbytes: int) -> str:
    """Write a size for reading, to three digits, in binary units: "1.95 GiB"."""
    return _BYTES.show(nbytes, ("B", "KiB", "MiB", "GiB", "TiB"))


def format_ns(ns: int) -> str:
    """Write a time for reading, to three digits: "2.21 ms"."""
    return _TIMES.show(ns, ("ns", "us", "ms", "s"))


def format_rate(bytes_per_s: int) -> str:
    """Write a rate for reading, to three digits, in decimal units: "25.1 GB/s"."""
    return _RATES.show(bytes_per_s, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))


def _spell_share(share: Fraction) -> str:
    return f"{Decimal(share.numerator * 100) / Decimal(share.denominator):f} %"


def _json(spell: Callable[[Any], str]) -> PlainSerializer:
    return PlainSerializer(spell, return_type=str, when_used="json")


# Types for schemas: they parse at the edge, hold integers, and dump to JSON as exact strings.
Bytes = Annotated[int, BeforeValidator(parse_bytes), _json(_BYTES.spell)]
Rate = Annotated[int, BeforeValidator(parse_rate), _json(_RATES.spell)]
Time = Annotated[int, BeforeValidator(parse_time), _json(_TIMES.spell)]
Ops = Annotated[int, BeforeValidator(parse_ops), _json(_OPS.spell)]
EnergyPerByte = Annotated[
    int, BeforeValidator(parse_energy_per_byte), _json(_ENERGIES_PER_BYTE.spell)
]
EnergyPerOp = Annotated[int, BeforeValidator(parse_energy_per_op), _json(_ENERGIES_PER_OP.spell)]
Power = Annotated[int, BeforeValidator(parse_power), _json(_POWERS.spell)]
Share = Annotated[Fraction, BeforeValidator(parse_share), _json(_spell_share)]
Percent = Annotated[Fraction, BeforeValidator(parse_percent), _json(_spell_share)]
