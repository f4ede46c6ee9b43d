"""This module describes a machine: its memory tiers, the links between them, and what computes.

A profile is data with provenance: one YAML file, every number with its unit, every block with its
`source`. Units are parsed here; what reads a profile sees integers (bytes, bytes/s, ns, fJ).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WrapSerializer,
    model_validator,
)

from moetier.sim.calibrated import DenseRows, ExpertRows
from moetier.sim.throughput import PositiveBytes, PositiveRate, ThroughputField, above_zero
from moetier.sim.units import (
    EnergyPerByte,
    EnergyPerOp,
    Ops,
    Percent,
    Power,
    Time,
    ceil_div,
    parse_ops,
)
from moetier.sim.yaml_input import check, parse_yaml, read_text
from moetier.traces.errors import InputError, nearest

ANY = "any"  # the key of a peak that holds for every number format


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    source: str = Field(min_length=1)  # data sheet, paper, measurement, or "unverified"


class Tier(_Block):
    """A memory: bytes, bytes/s, and femtojoules per byte read and written."""

    capacity: PositiveBytes  # GiB, MB, ...
    bandwidth: PositiveRate  # GB/s
    read_energy: EnergyPerByte = 0  # pJ/bit
    write_energy: EnergyPerByte = 0  # pJ/bit


class Link(_Block):
    """A path from *src* to *dst*, both names of tiers, that up to *lanes* transfers share."""

    src: str  # a tier
    dst: str  # the tier that copies go to
    bandwidth: ThroughputField  # one rate, or rows of size, rate and lanes
    latency: Time = 0  # once per transfer
    lanes: int = Field(default=1, ge=1)
    energy: EnergyPerByte = 0  # pJ/bit

    def copy_ns(self, nbytes: int, active: int = 1) -> int:
        """Return how long *nbytes* take while *active* lanes are busy, in ns, rounded up once.

        Each busy lane gets an equal share of the total throughput for transfers of this size.
        """
        if active < 1:
            raise ValueError(f"a transfer keeps at least 1 lane busy, got active={active}")
        rate = self.bandwidth.total(nbytes, active)
        return self.latency + ceil_div(nbytes * active * 10**9 * rate.denominator, rate.numerator)


def _read_peak(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value
    above_zero(parse_ops(value))
    return {ANY: value}


def _write_peak(peak: dict[str, int], write: Any) -> Any:
    written = write(peak)
    return written[ANY] if set(peak) == {ANY} else written


PositiveOps = Annotated[Ops, AfterValidator(above_zero)]


class Compute(_Block):
    """A processor that reads its weights from *tier*.

    *peak* is in operations per second (a multiply-add is two), by number format or one for all;
    *overhead* in ns is paid per batch of kernels, *host_time_per_layer* in ns by the host program.
    Measured times of *experts* and of the *dense* part replace the roofline over the peak; those of
    the dense part include the overhead.
    """

    tier: str  # where its weights lie
    peak: Annotated[
        dict[str, PositiveOps],
        Field(min_length=1),
        BeforeValidator(_read_peak),
        WrapSerializer(_write_peak, when_used="json"),
    ]
    energy: EnergyPerOp = 0  # pJ/op
    overhead: Time = 0
    host_time_per_layer: Time = 0
    experts: ExpertRows = ()
    dense: DenseRows = ()

    def peak_of(self, dtype: str) -> int:
        """Return operations per second in *dtype*; raise `InputError` where none is known."""
        found = self.peak.get(dtype, self.peak.get(ANY))
        if found is None:
            raise InputError(
                f"no peak for '{dtype}' on the processor of tier '{self.tier}'",
                way_out=f"add it to its `peak`; known: {', '.join(self.peak)}",
            )
        return found


class Contention(_Block):
    """What copies into the fastest tier and the main processor take from each other.

    *compute_slowdown* is how much longer compute takes while such a copy is in flight: "20 %" means
    that it progresses at 1 / 1.2 of its speed.
    """

    compute_slowdown: Percent


class Profile(BaseModel):
    """A machine: *tiers* from fastest to slowest, *links*, and processors, the main one first."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)  # what results call it
    source: str = Field(min_length=1)  # where it comes from, in a line
    tiers: dict[str, Tier] = Field(min_length=1)  # by name
    links: list[Link] = Field(default_factory=list)  # those between neighbouring tiers at least
    compute: dict[str, Compute] = Field(min_length=1)  # by name
    contention: Contention | None = None  # null: not known, and not modelled
    static_power: Power = 0  # whatever runs
    notes: str | None = None  # repeated by every result
    identity: dict[str, str] | None = None  # of a calibrated profile: GPU, driver, precision, date

    @property
    def tier_names(self) -> tuple[str, ...]:
        """Return the names of the tiers, fastest first."""
        return tuple(self.tiers)

    @property
    def main_compute(self) -> Compute:
        """Return the processor that runs the model."""
        return next(iter(self.compute.values()))

    def link(self, src: str, dst: str) -> Link:
        """Return the link from tier *src* to tier *dst*; raise `InputError` when there is none."""
        for link in self.links:
            if (link.src, link.dst) == (src, dst):
                return link
        known = ", ".join(f"{link.src} -> {link.dst}" for link in self.links) or "none"
        raise InputError(f"'{self.name}' has no link {src} -> {dst}", way_out=f"known: {known}")

    @model_validator(mode="after")
    def _fits_together(self) -> Profile:
        known = f"its tiers are {', '.join(self.tiers)}"
        ends = [
            (f"links.{i}.{end}", getattr(link, end))
            for i, link in enumerate(self.links)
            for end in ("src", "dst")
        ]
        ends += [(f"compute.{name}.tier", c.tier) for name, c in self.compute.items()]
        for key, tier in ends:
            if tier not in self.tiers:
                raise ValueError(f"{key}: no tier '{tier}'; {known}")
        pairs = [(link.src, link.dst) for link in self.links]
        for i, pair in enumerate(pairs):
            if pair in pairs[:i]:
                raise ValueError(f"links.{i}: {pair[0]} -> {pair[1]} is given twice; keep one")
            if pair[0] == pair[1]:
                raise ValueError(f"links.{i}: leads from '{pair[0]}' to itself; name two tiers")
        for (fast, above), (slow, below) in pairwise(self.tiers.items()):
            if (slow, fast) not in pairs:
                raise ValueError(
                    f"links: none from '{slow}' to the next faster tier '{fast}'; add one"
                )
            if below.bandwidth > above.bandwidth:
                raise ValueError(f"tiers: '{slow}' is faster than '{fast}'; list the fastest first")
        return self


def profile_names() -> list[str]:
    """Return the names of the profiles that come with the package, sorted."""
    found = (file.name for file in files("moetier.hw_profiles").iterdir())
    return sorted(name.removesuffix(".yaml") for name in found if name.endswith(".yaml"))


def load_profile(name_or_path: str | Path) -> Profile:
    """Return the profile that comes under a name, or in a YAML file at a path.

    Text with a slash or a YAML suffix is a path. Raises `InputError`: unknown name (the nearest is
    suggested), file that cannot be read, or what is wrong in it.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or "/" in text or text.endswith((".yaml", ".yml")):
        return _parsed(read_text(Path(name_or_path)), text)
    names = profile_names()
    if text not in names:
        way_out = (
            f"{nearest(text, names)}known: {', '.join(names)}; or give the path of a YAML file"
        )
        raise InputError(f"unknown hardware '{text}'", way_out=way_out)
    file = files("moetier.hw_profiles") / f"{text}.yaml"
    return _parsed(read_text(file), f"hw_profiles/{text}.yaml")


@lru_cache(maxsize=64)
def _parsed(text: str, where: str) -> Profile:
    """Return the profile in *text*; a sweep asks for the same one at every point."""
    return check(Profile, parse_yaml(text, where), where=where)
