"""This module lists what is there: policies and their parts, machines, models, predictors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moetier.traces.registry import Registry

Entry = dict[str, Any]


def policies() -> list[Entry]:
    """Return the presets, expanded, then every part of every seam."""
    from moetier.experiments.resolve import full_policy
    from moetier.sim.policy.compose import presets
    from moetier.sim.policy.seams import DEFAULTS, SEAMS

    found: list[Entry] = [
        {
            "kind": "preset",
            "name": name,
            "summary": _spell(dict(seams)),
            "expanded": full_policy(name),
        }
        for name, seams in presets().items()
    ]
    for seam, registry in SEAMS.items():
        found += [
            {**part, "default": part["name"] == DEFAULTS[seam]} for part in _parts(seam, registry)
        ]
    return found


def hardware() -> list[Entry]:
    """Return the machines that come with the package."""
    from moetier.sim.hardware import load_profile, profile_names
    from moetier.sim.units import format_bytes, format_rate

    found = []
    for name in profile_names():
        profile = load_profile(name)
        tiers = [
            f"{tier} {format_bytes(spec.capacity)} at {format_rate(spec.bandwidth)}"
            for tier, spec in profile.tiers.items()
        ]
        calibrated = profile.identity is not None
        found.append({
            "kind": "hardware", "name": name, "summary": ", ".join(tiers), "source": profile.source,
            "tiers": list(profile.tiers), "calibrated": calibrated,
        })  # fmt: skip
    return found


def models() -> list[Entry]:
    """Return the published geometries."""
    from moetier.sim.units import format_bytes
    from moetier.traces.errors import InputError
    from moetier.traces.formats import expert_bytes
    from moetier.traces.geometry import load_geometry, published

    found = []
    for name in published():
        g = load_geometry(name)
        try:
            total: int | None = g.n_experts * sum(expert_bytes(g, "bf16"))
        except InputError:
            total = None
        size = "size unknown" if total is None else f"{format_bytes(total)} of experts in bf16"
        found.append({
            "kind": "model", "name": name,
            "summary": f"{g.n_moe_layers} layers of {g.n_experts} experts, top {g.top_k}, {size}",
            "n_moe_layers": g.n_moe_layers, "n_experts": g.n_experts, "top_k": g.top_k,
            "expert_bytes_bf16": total, "source": g.source, "unverified": g.unverified,
        })  # fmt: skip
    return found


def predictors() -> list[Entry]:
    """Return the predictors of later layers' routing."""
    from moetier.traces.predictors import PREDICTORS

    return _parts("predictor", PREDICTORS)


def importers() -> list[Entry]:
    """Return the formats that `moetier trace convert` reads."""
    from moetier.traces.importers import IMPORTERS

    found = _parts("importer", IMPORTERS)
    for entry in found:
        entry["parameters"] = [p for p in entry["parameters"] if p["name"] not in ("source", "out")]
    return found


KINDS: dict[str, Callable[[], list[Entry]]] = {
    "policies": policies,
    "hardware": hardware,
    "models": models,
    "predictors": predictors,
    "importers": importers,
}


def _parts(kind: str, registry: Registry[Any]) -> list[Entry]:
    return [
        {
            "kind": kind,
            "name": name,
            "summary": registry.summary(name),
            "parameters": [
                {"name": p.name, "type": p.type, "default": p.default}
                for p in registry.parameters(name)
            ],
        }
        for name in registry.names()
    ]


def _spell(seams: dict[str, Any]) -> str:
    return ", ".join(f"{seam}: {value}" for seam, value in seams.items())
