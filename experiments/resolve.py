"""This module writes a run's config out in full: every default filled in, every preset expanded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moetier.experiments.config import RunConfig
from moetier.sim.policy.compose import expand
from moetier.sim.policy.seams import SEAMS


def resolved(config: RunConfig) -> dict[str, Any]:
    """Return *config* as plain values with all defaults; reading it back gives the same run.

    A key that stays null takes what the source says (`weights`) or what the machine has (`tiers`);
    a tier missing from `capacity` takes what is left.
    """
    data = config.model_dump(mode="json")
    for source in ("trace", "synthetic", "live"):
        if data[source] is None:
            del data[source]
    if config.live is None:
        del data["evaluate"]
    if config.machine is None:
        del data["machine"]
    data["policy"] = full_policy(config.policy)
    return data


def full_policy(spec: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return *spec* as a mapping of all seams, each part with all its parameters."""
    return {seam: _full(seam, value) for seam, value in expand(spec).items()}


def _full(seam: str, value: Any) -> Any:
    if isinstance(value, Mapping) and "kind" not in value:  # eviction, tier by tier
        return {tier: _full(seam, item) for tier, item in value.items()}
    given = {"kind": value} if isinstance(value, str) else dict(value)
    found = SEAMS[seam].defaults(str(given["kind"]), f"policy.{seam}")
    defaults = {key: _plain(value) for key, value in found.items()}
    full = {"kind": given["kind"], **defaults, **given}
    return full["kind"] if len(full) == 1 else full


def _plain(value: Any) -> Any:
    """Return a default as YAML can write it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value)
