"""This module recomputes where decode time goes when experts are copied on demand and not kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moetier.experiments.papers import Paper, Row, row
from moetier.experiments.studies import register
from moetier.sim.hardware import Profile, load_profile
from moetier.sim.run import Setting, simulate
from moetier.traces.geometry import load_geometry
from moetier.traces.io import ArrayTrace
from moetier.traces.synthetic import Synthetic

FASTER_LINK = "26.8 GB/s"
"""PCIe 4.0 x16 in one direction, the highest rate seen in practice (club-3090#1126)."""


@register("speculating-experts")
def study(paper: Paper) -> list[Row]:
    """Compare the shares of copies and compute, on the machine of the paper."""
    geometry = load_geometry("qwen3-30b-a3b")
    source = ArrayTrace.of(Synthetic(geometry, prompt=1024, tokens=32, reuse=0.0))
    slow = load_profile("rtx-a6000")
    fast = _with_rate(slow, FASTER_LINK)
    found = [_shares(source, profile) for profile in (slow, fast)]
    copy, compute = ([each[i] for each in found] for i in (0, 1))
    later = "needs the policy that runs predicted experts, which is not there yet"
    about = [
        "which experts are chosen does not matter: nothing is kept",
        f"low and high: PCIe at 25.1 GB/s and at {FASTER_LINK}",
        "no time for the host program, which the paper does not give",
    ]
    return [
        row(paper, "expert_gib", found[0][2] / 2**30),
        row(paper, "copy_share", copy[0], low=min(copy), high=max(copy), assumptions=about),
        row(
            paper,
            "compute_share",
            compute[0],
            low=min(compute),
            high=max(compute),
            assumptions=about,
        ),
        row(paper, "tpot_gain_1024", reason=later),
        row(paper, "tpot_gain_65536", reason=later),
    ]


def _shares(source: ArrayTrace, profile: Profile) -> tuple[float, float, int]:
    """Return the shares of decode time that copies and compute take, and the experts' bytes."""
    result = simulate(source, Setting(profile, "on-demand-uncached", weights="bf16"))
    parts: Mapping[str, Any] = result.metrics["time_breakdown_ms"]
    busy = parts["dense"] + parts["expert"]
    return (
        result.metrics["copy_share"],
        busy / result.metrics["tpot_ms"],
        result.stage.budget.stored,
    )


def _with_rate(profile: Profile, rate: str) -> Profile:
    """Return *profile* with another bandwidth of its only link into the fastest tier."""
    data = profile.model_dump(mode="json")
    data["links"][0]["bandwidth"] = rate
    return Profile.model_validate(data)
