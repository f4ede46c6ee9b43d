"""This module stores and computes every expert at fewer bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from moetier.sim.layout import Layout
from moetier.sim.policy.base import ExpertFormat, Precision
from moetier.sim.policy.seams import precision
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry


@precision.register("uniform")
class Uniform(Precision):
    """Use every expert at *bits* bits per weight, in groups of *group* with scale and zero-point.

    A group carries a 16-bit scale and a zero-point of *bits* bits, so a weight costs
    `bits + (16 + bits) / group` bits. Lossy unless a run measures otherwise.
    """

    alters_output = True

    def __init__(self, bits: int, group: int = 32) -> None:
        if not 1 <= bits <= 16:
            raise InputError(f"precision 'uniform': bits is {bits}", way_out="use 1 to 16")
        if group < 1:
            raise InputError(f"precision 'uniform': group is {group}", way_out="use at least 1")
        self.bits, self.group = bits, group
        self.formats = (ExpertFormat(bits, group=group),)
        self.kernel = f"codes-{bits}"

    def layout(self, expert_bytes: Sequence[int], geometry: Geometry) -> Layout:
        check_bits("uniform", self.bits, expert_bytes, geometry)
        size = quantised_bytes(geometry, self.bits, self.group)
        return Layout([[size]] * len(expert_bytes), geometry.n_experts)


def check_bits(precision: str, bits: int, expert_bytes: Sequence[int], geometry: Geometry) -> None:
    """Raise `InputError` for codes of *bits* bits that are finer than what is stored.

    Scales and zero-points come on top: 8 bits in groups of 32 take a little more than plain int8.
    """
    codes = math.ceil(Fraction(geometry.expert_weights * bits, 8))
    if codes > min(expert_bytes):
        raise InputError(
            f"precision '{precision}': an expert's codes of {bits} bits take {codes} bytes, more "
            f"than the {min(expert_bytes)} of the stored format",
            way_out="use fewer bits, `weights: bf16`, or `precision: full`",
        )


def quantised_bytes(geometry: Geometry, bits: int, group: int) -> int:
    """Return what an expert takes in codes of *bits* bits, with scales and zero-points."""
    cost = bits + Fraction(16 + bits, group)
    return math.ceil(geometry.expert_weights * cost / 8)
