"""This module asks whether prefetching predicted experts loses where a phone lost, and why.

The recorded routing of that phone is replayed, with predictions drawn at the recall measured there,
experts beginning as their slices land. Nothing is fitted to a run with prefetching. Beside the
phone stand a GPU whose link has no idle time and one whose link has: the two signs of one policy.
The routing is data from outside the package, found through `MOETIER_DATA`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from moetier.experiments.papers import Paper, Row, row
from moetier.experiments.studies import register
from moetier.sim.hardware import Profile, load_profile
from moetier.sim.machine.base import Span
from moetier.sim.run import Setting, simulate
from moetier.traces.importers.bigmoeonedge import import_bigmoeonedge
from moetier.traces.io import ArrayTrace, TraceReader
from moetier.traces.predictors import create
from moetier.traces.predictors.annotate import Annotated

DATA = "MOETIER_DATA"
"""The variable that names the folder with recorded runs."""

RECALL, SEED = 0.886, 0  # the stale gate on Qwen3-30B-A3B, one layer ahead
PREFETCH = {"kind": "predicted", "depth": 1}  # the phone takes the predicted top-k, too
MIB = 1 << 20
CACHE = 4000 * MIB
SMALLER = [250 * MIB, 2000 * MIB]  # less than one token uses, as with no cache; and half
PHONE, SATURATED, IDLE = "phone-ufs4", "rtx-4090", "gh200"
SLOWDOWN = "50 %"
"""The most that runs without prefetching allow: with reads beside compute the quietest twentieth of
the tokens of k8_stream took 112 ms of compute instead of 98, and in this model half of the 56 ms of
expert compute stands beside a read. The pair of k8_c4000_l4 gives none (116 ms instead of 120)."""


@dataclass(frozen=True)
class Outcome:
    """What one run says per decoded token, and the share of time a link carries something."""

    tpot_ms: float
    wait_ms: float
    nbytes: float
    wasted: float
    hits: float
    link_busy: float


@register("bigmoeonedge")
def study(paper: Paper) -> list[Row]:
    """Compare what prefetching does on the phone; say what it does on two other machines."""
    folder = os.environ.get(DATA)
    if folder is None:
        reason = f"the recorded routing is not part of the package; name its folder in {DATA}"
        return [row(paper, name, reason=reason) for name in paper.figures]
    routing = recorded(folder)
    plain, ahead = pair(routing, PHONE)
    slow_plain, slow_ahead = pair(routing, PHONE, slowdown=SLOWDOWN)
    about = [
        f"predictions are drawn at a recall of {RECALL}, top-6 where the published runs use top-8; "
        "the cost of predicting is left out",
        "low and high: compute not slowed down by copies, or by half beside one; the recorded runs "
        "without prefetching allow no more",
        *(line for size in SMALLER for line in told(PHONE, size, *pair(routing, PHONE, size))),
        *told(PHONE, CACHE, plain, ahead),
        *told(f"{PHONE}, compute {SLOWDOWN} slower beside copies", CACHE, slow_plain, slow_ahead),
        *(line for name in (SATURATED, IDLE) for line in told(name, CACHE, *pair(routing, name))),
    ]

    def compared(name: str, free: float, slowed: float) -> Row:
        ends = sorted([free, slowed])
        return row(paper, name, free, low=ends[0], high=ends[1], assumptions=about)

    return [
        compared("throughput_change", gain(plain, ahead), gain(slow_plain, slow_ahead)),
        compared("bytes_ratio", ahead.nbytes / plain.nbytes, slow_ahead.nbytes / slow_plain.nbytes),
        compared("hit_rate", ahead.hits, slow_ahead.hits),
        compared(
            "stall_ratio", ahead.wait_ms / plain.wait_ms, slow_ahead.wait_ms / slow_plain.wait_ms
        ),
    ]


def gain(plain: Outcome, ahead: Outcome) -> float:
    """Return how many more tokens per second *ahead* gives, below zero where it loses."""
    return plain.tpot_ms / ahead.tpot_ms - 1


def pair(
    routing: Annotated, name: str, cache: int = CACHE, slowdown: str | None = None
) -> tuple[Outcome, Outcome]:
    """Return what the machine *name* does without prefetching, and with it."""
    profile = load_profile(name)
    if slowdown is not None:
        block = {"compute_slowdown": slowdown, "source": "a choice of this study"}
        profile = Profile.model_validate(profile.model_dump(mode="json") | {"contention": block})
    return _run(routing, profile, "none", cache), _run(routing, profile, PREFETCH, cache)


def told(name: str, cache: int, plain: Outcome, ahead: Outcome) -> Iterator[str]:
    """Yield one sentence on what prefetching changes, and why."""
    yield (
        f"{name}, cache {cache // MIB} MiB: prefetching changes tokens/s by "
        f"{gain(plain, ahead):+.1%}; link busy {plain.link_busy:.0%} of the time, then "
        f"{ahead.link_busy:.0%}; {plain.nbytes / MIB:.0f}, then {ahead.nbytes / MIB:.0f} MiB a "
        f"token, {ahead.wasted / MIB:.0f} of them wasted; compute waits {plain.wait_ms:.2f}, then "
        f"{ahead.wait_ms:.2f} ms of {plain.tpot_ms:.2f} and {ahead.tpot_ms:.2f}"
    )


@lru_cache(maxsize=1)
def recorded(folder: str) -> Annotated:
    """Return the phone's routing with drawn predictions."""
    source = Path(folder) / "phone-qwen3-30b-a3b" / "route.csv"
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "phone.parquet"
        import_bigmoeonedge(source, out)
        routing = ArrayTrace.of(TraceReader(out))
    return Annotated(routing, create({"kind": "recall-model", "recall": [RECALL], "seed": SEED}))


def _run(routing: Annotated, profile: Profile, prefetch: Any, cache: int) -> Outcome:
    tier = next(iter(profile.tiers))
    policy = {"eviction": "lru", "prefetch": prefetch}
    setting = Setting(profile, policy, {tier: cache}, tiers=list(profile.tiers)[:2], overlap=True)
    copies: list[tuple[int, int]] = []

    def watch(span: Span) -> None:
        if span.lane.startswith("link "):
            copies.append((span.start, span.end))

    result = simulate(routing, setting, on_span=watch)
    found = result.metrics
    return Outcome(
        tpot_ms=found["tpot_ms"],
        wait_ms=found["time_breakdown_ms"]["wait"],
        nbytes=found["bytes_per_token"],
        wasted=found["prefetch_wasted_bytes"] / found["tokens"],
        hits=found["hit_rate_decode"],
        link_busy=covered(copies) / result.elapsed_ns,
    )


def covered(spans: list[tuple[int, int]]) -> int:
    """Return how much time *spans* cover together, counting what overlaps once."""
    total = edge = 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, edge))
        edge = max(edge, end)
    return total
