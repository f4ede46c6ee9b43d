"""This module picks, from a profile, the chain of tiers and links that experts travel."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from moetier.sim.hardware import Compute, Link, Profile, Tier
from moetier.traces.errors import InputError


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """The tiers from the one the model computes from down to the one that holds everything.

    `links[i]` leads from tier `i + 1` up to tier `i`. All tiers but the last are caches;
    `demotion[i]` is the way back down, present only where tiers are exclusive. `cpu` computes from
    tier 1, if anything does. With `overlap` an expert may begin as soon as its own slices are
    there; `slowdown` is how much longer compute takes beside a copy into the fastest tier.
    """

    names: tuple[str, ...]
    tiers: tuple[Tier, ...]
    links: tuple[Link, ...]
    main: Compute
    cpu: Compute | None
    static_power: int  # microwatts
    demotion: tuple[Link, ...] = ()
    overlap: bool = False
    slowdown: Fraction = Fraction(0)

    @property
    def cached(self) -> tuple[str, ...]:
        """Return the names of the cached tiers, fastest first."""
        return self.names[:-1]

    @property
    def exclusive(self) -> bool:
        """Return whether a slice lives in one cached tier only."""
        return bool(self.demotion)


def build_hierarchy(
    profile: Profile,
    tiers: list[str] | None = None,
    exclusive: bool = False,
    overlap: bool = False,
) -> Hierarchy:
    """Return the chain of *tiers* (default: from the main processor's tier down) of *profile*.

    Naming fewer tiers leaves out the slowest ones, as when a model fits in the host's memory.
    """
    main = profile.main_compute
    known = list(profile.tiers)
    names = tiers or known[known.index(main.tier) :]
    for name in names:
        if name not in profile.tiers:
            raise InputError(
                f"'{profile.name}' has no tier '{name}'", where="tiers", way_out=f"use {known}"
            )
    if names[0] != main.tier or len(names) < 2:
        raise InputError(
            f"the tiers {names} must be two or more, and begin with '{main.tier}', from which the "
            "processor computes",
            where="tiers",
            way_out=f"'{profile.name}' has {known}",
        )
    if exclusive and len(names) < 3:
        raise InputError("exclusive tiers need two caches", where="exclusive", way_out="drop it")
    below = [c for c in profile.compute.values() if c.tier == names[1]]
    return Hierarchy(
        names=tuple(names),
        tiers=tuple(profile.tiers[name] for name in names),
        links=tuple(profile.link(low, high) for high, low in pairwise(names)),
        main=main,
        cpu=below[0] if below else None,
        static_power=profile.static_power,
        demotion=(profile.link(names[0], names[1]),) if exclusive else (),
        overlap=overlap,
        slowdown=profile.contention.compute_slowdown if profile.contention else Fraction(0),
    )
