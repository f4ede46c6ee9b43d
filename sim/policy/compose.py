"""This module builds a policy out of its parts: from a preset, a mapping of seams, or both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from moetier.sim.policy.base import Eviction, Miss, Part, Precision, Prefetch, Routing, Warmup
from moetier.sim.policy.seams import DEFAULTS, SEAMS
from moetier.traces.errors import InputError, nearest


@dataclass(frozen=True, slots=True)
class Policy:
    """One part per seam, and one eviction policy per cached tier, fastest first."""

    name: str
    routing: Routing
    precision: Precision
    prefetch: Prefetch
    warmup: Warmup
    miss: Miss
    eviction: tuple[Eviction, ...]

    @property
    def shared_parts(self) -> list[Part]:
        """Return the parts that look at the fastest tier, in seam order."""
        return [self.routing, self.precision, self.prefetch, self.warmup, self.miss]

    @property
    def parts(self) -> list[Part]:
        """Return every part."""
        return [*self.shared_parts, *self.eviction]

    @property
    def alters_output(self) -> bool:
        """Return whether any part is lossy."""
        return any(part.alters_output for part in self.parts)

    @property
    def needs_future(self) -> bool:
        """Return whether any part is an oracle."""
        return any(part.needs_future for part in self.parts)

    @property
    def uses_predictions(self) -> bool:
        """Return whether any part reads predicted scores."""
        return any(part.uses_predictions for part in self.parts)

    @property
    def asks_lateness(self) -> bool:
        """Return whether decisions depend on timing."""
        return any(part.asks_lateness for part in self.parts)


@cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Return the named policies, each a mapping of seams; read once, so copy before changing."""
    text = (files("moetier.sim.policy") / "presets.yaml").read_text()
    loaded: Mapping[str, Mapping[str, Any]] = yaml.safe_load(text)
    return loaded


def expand(spec: str | Mapping[str, Any], where: str = "policy") -> dict[str, Any]:
    """Return *spec* as a full mapping of seams: preset filled in, defaults added, keys checked.

    Its `name` is for people to read and is left out.
    """
    known = presets()
    given: dict[str, Any] = {"preset": spec} if isinstance(spec, str) else dict(spec)
    if not isinstance(given.pop("name", ""), str):
        raise InputError(f"name is {spec['name']!r}", where=where, way_out="use a text")  # type: ignore[index]
    preset = given.pop("preset", None)
    if preset is not None and preset not in known:
        raise InputError(
            f"unknown policy '{preset}'",
            where=where,
            way_out=f"{nearest(preset, known)}presets: {', '.join(known)}",
        )
    seams = {**DEFAULTS, **(deepcopy(known[preset]) if preset is not None else {}), **given}
    for key in seams:
        if key not in SEAMS:
            raise InputError(
                f"unknown seam '{key}'",
                where=where,
                way_out=f"{nearest(key, SEAMS)}seams: {', '.join(SEAMS)}, preset, name",
            )
    return seams


def name_of(spec: str | Mapping[str, Any]) -> str:
    """Return the name of *spec*; without one, the preset, then what differs from the defaults."""
    if isinstance(spec, str):
        return spec
    if "name" in spec:
        return str(spec["name"])
    words = [str(spec["preset"])] if "preset" in spec else []
    words += [f"{seam}={_word(value)}" for seam, value in spec.items() if seam != "preset"]
    return " ".join(words) or "on-demand"


def compose(
    spec: str | Mapping[str, Any], cached_tiers: Sequence[str] = ("fast",), where: str = "policy"
) -> Policy:
    """Build the policy that *spec* describes, for the *cached_tiers*, fastest first."""
    seams = expand(spec, where)
    parts = {
        seam: _create(seam, value, f"{where}.{seam}")
        for seam, value in seams.items()
        if seam != "eviction"
    }
    return Policy(
        name=name_of(spec),
        eviction=_evictions(seams["eviction"], cached_tiers, f"{where}.eviction"),
        **parts,
    )


def _evictions(value: Any, tiers: Sequence[str], where: str) -> tuple[Eviction, ...]:
    """One name means the fastest tier, LRU below; a mapping without `kind` goes by tier."""
    if isinstance(value, Mapping) and "kind" not in value:
        for tier in value:
            if tier not in tiers:
                raise InputError(
                    f"no cached tier '{tier}'", where=where, way_out=f"cached: {', '.join(tiers)}"
                )
        by_tier = [value.get(tier, "lru") for tier in tiers]
    else:
        by_tier = [value, *["lru"] * (len(tiers) - 1)]
    return tuple(_create("eviction", item, where) for item in by_tier)


def _create(seam: str, value: Any, where: str) -> Any:
    """Build one part from its name or from `{kind: name, parameter: value, ...}`."""
    if isinstance(value, str):
        return SEAMS[seam].create(value, {}, where)
    if isinstance(value, Mapping) and "kind" in value:
        arguments = {key: item for key, item in value.items() if key != "kind"}
        return SEAMS[seam].create(value["kind"], arguments, where)
    raise InputError(
        f"expected a name or a mapping with `kind`, got {value!r}",
        where=where,
        way_out=f"names: {', '.join(SEAMS[seam].names())}",
    )


def _word(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    rest = ",".join(f"{key}={item}" for key, item in value.items() if key != "kind")
    return f"{value['kind']}({rest})" if "kind" in value else f"({rest})"
