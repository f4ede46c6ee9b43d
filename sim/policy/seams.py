"""This module names the six seams and the registry behind each."""

from __future__ import annotations

from typing import Any

from moetier.sim.policy.base import Eviction, Miss, Part, Precision, Prefetch, Routing, Warmup
from moetier.traces.registry import Registry

routing: Registry[Routing] = Registry("routing", "moetier.sim.policy.routing")
precision: Registry[Precision] = Registry("precision", "moetier.sim.policy.precision")
prefetch: Registry[Prefetch] = Registry("prefetch", "moetier.sim.policy.prefetch")
eviction: Registry[Eviction] = Registry("eviction", "moetier.sim.policy.eviction")
warmup: Registry[Warmup] = Registry("warmup", "moetier.sim.policy.warmup")
miss: Registry[Miss] = Registry("miss", "moetier.sim.policy.miss")

SEAMS: dict[str, Registry[Any]] = {
    "routing": routing,
    "precision": precision,
    "prefetch": prefetch,
    "eviction": eviction,
    "warmup": warmup,
    "miss": miss,
}
DEFAULTS = {
    "routing": "exact",
    "precision": "full",
    "prefetch": "none",
    "eviction": "lru",
    "warmup": "none",
    "miss": "fetch",
}

__all__ = [
    "DEFAULTS",
    "SEAMS",
    "Part",
    "eviction",
    "miss",
    "precision",
    "prefetch",
    "routing",
    "warmup",
]
