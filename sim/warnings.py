"""This module says what a user should know about a run: what it assumed, and what looks wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moetier.sim.hardware import Profile
from moetier.sim.layout import Layout
from moetier.sim.policy.base import Prefetch
from moetier.sim.policy.compose import Policy
from moetier.sim.units import format_bytes
from moetier.traces.schema import Header


def limitations(
    header: Header, profile: Profile, policy: Policy, expert_ops: int, *, replayed: bool = True
) -> list[str]:
    """Return what a simulated run took for granted, one sentence each.

    Routing is *replayed* from a trace, or comes from a model that runs, which knows more.
    """
    found = modelled(profile)
    unverified = _blocks(profile, "unverified")
    if unverified:
        found.append(f"unverified numbers in '{profile.name}': {', '.join(unverified)}")
    if header.unknown:
        found.append(f"the trace does not say: {', '.join(header.unknown)}")
    if header.geometry.unverified:
        cells = ", ".join(header.geometry.unverified)
        found.append(f"unverified in the geometry of '{header.geometry.name}': {cells}")
    if not expert_ops:
        found.append("the model's sizes are unknown, so experts are timed by their bytes alone")
    if header.provenance.kind == "synthetic":
        found.append("the routing is synthetic")
    if replayed:
        found += [part.assumption for part in policy.parts if part.assumption]
    if replayed and policy.alters_output:
        found.append(
            "replayed lossy policy: recorded routing cannot react to what the policy changes, and "
            "no accuracy is known; `moetier evaluate` runs it inside a model"
        )
    if profile.notes:
        found.append(f"notes on '{profile.name}': {profile.notes}")
    fitted = _blocks(profile, "fitted")
    if fitted:
        found.append(f"fitted numbers in '{profile.name}': {', '.join(fitted)}")
    if type(policy.warmup).__name__ != "Untouched":
        found.append("bytes brought by warm-up are counted but take no time and no energy")
    return found


def modelled(profile: Profile) -> list[str]:
    """Return what a simulation says of its times, which is not true of measured ones."""
    found = ["time and energy are modelled, not measured"]
    if not profile.main_compute.experts and not profile.main_compute.dense:
        found.append(f"compute on '{profile.name}' is a roofline over the peaks of its profile")
    if profile.identity is not None:
        when = profile.identity.get("date", "an unknown date")
        found.append(
            f"'{profile.name}' was calibrated on one machine ({when}); this simulation may run on "
            "any, and says nothing about how another would do"
        )
    if profile.contention is None:
        found.append(
            f"'{profile.name}' does not say how much copies slow compute down; here they do not"
        )
    return found


def warnings_of(
    policy: Policy,
    layout: Layout,
    capacity: int,
    top_k: int,
    metrics: Mapping[str, Any],
    profiled: bool = True,
) -> list[str]:
    """Return what looks wrong about a finished run; *profiled*: was there a `popularity`?"""
    found = []
    if not profiled and any(part.needs_popularity for part in policy.parts):
        found.append(
            "no profile: the static set is the first experts of every layer, which are no better "
            "than any; name a trace with `popularity:`"
        )
    experts = [
        layout.nbytes[first : first + layout.n_parts]
        for first in range(0, len(layout.nbytes), layout.layer_slices)
    ]
    token = sum(top_k * sum(parts) for parts in experts)
    # When a layer comes round, all other layers' experts are younger than its own: from here on
    # there is room for a slice of its own beside them. Of experts in parts a token may use fewer.
    cliff = token - max(top_k * sum(parts) - min(parts) for parts in experts)
    fetches_all = not policy.miss.computes_below and not policy.miss.alters_output
    evicts_oldest = type(policy.eviction[0]).__name__ in ("LRU", "FIFO")
    # A batch of requests, or a step, uses more than one token does; how much, the run has shown.
    steps = metrics["decode_steps"]
    step = metrics["decode_bytes_looked_up"] // steps if steps else 0
    starved = metrics["hit_rate_decode"] == 0 and steps > 1 and capacity < step
    unit, used = ("step", step) if starved and step > token else ("token", token)
    oldest_goes = evicts_oldest and fetches_all and not metrics["prefetch_issued"]
    if oldest_goes and ((capacity < cliff and layout.n_parts == 1) or starved):
        found.append(
            f"{type(policy.eviction[0]).__name__} cliff: one {unit}'s experts take "
            f"{format_bytes(used)}, the cache {format_bytes(capacity)}; "
            "by the time a layer comes round again its experts are gone, so nothing hits"
        )
    prefetches = type(policy.prefetch).candidates is not Prefetch.candidates
    if prefetches and not metrics["prefetch_issued"]:
        found.append("policy inert: the prefetcher never issued anything")
    if policy.miss.alters_output and not (metrics["skipped_share"] or metrics["degraded_share"]):
        found.append("policy inert: nothing was ever skipped or done without")
    return found


def _blocks(profile: Profile, word: str) -> list[str]:
    """Return the blocks of *profile* whose source has *word*."""
    blocks = {f"tiers.{name}": tier.source for name, tier in profile.tiers.items()}
    blocks |= {f"links.{link.src}-{link.dst}": link.source for link in profile.links}
    blocks |= {f"compute.{name}": compute.source for name, compute in profile.compute.items()}
    if profile.contention is not None:
        blocks["contention"] = profile.contention.source
    return [name for name, source in blocks.items() if word in source.lower()]
