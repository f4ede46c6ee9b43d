"""This module recomputes what window-aware prefetching buys on a phone.

The paper gives neither its storage bandwidths, nor the compute time of a token, nor the size of the
expert cache. For every pair of the last two in a stated range, the bandwidth of each storage is
fitted to the throughput that is published *without* prefetching; what prefetching then gains is a
prediction, and its spread over the pairs is the band.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from moetier.experiments.papers import Paper, Row, row
from moetier.experiments.studies import register
from moetier.sim.hardware import Profile, load_profile
from moetier.sim.run import Setting, simulate
from moetier.traces.formats import expert_bytes
from moetier.traces.geometry import load_geometry
from moetier.traces.io import ArrayTrace
from moetier.traces.predictors import create
from moetier.traces.predictors.annotate import Annotated
from moetier.traces.synthetic import Synthetic

MODEL, MACHINE, WEIGHTS = "deepseek-vl2-tiny", "phone-sd8-elite", "q4_0"
TOKENS, SEED = 96, 0
RECALL = [0.9104, 0.8851]  # of the published training log, one and two layers ahead
BASELINES = {"nvme": 3.753, "mid_ufs": 3.6, "slow_ufs": 3.4, "sd_card": 3.2}  # tokens/s
HOST_MS = (16, 18, 20)  # per layer: 192 to 240 of the 266 ms that a token takes at most
CACHES = (Fraction(1, 4), Fraction(3, 8), Fraction(1, 2))  # 16, 24 and 32 of 64 experts a layer
NAIVE = {"kind": "predicted", "depth": 2, "budget": 8}
WINDOW = {"kind": "window-aware", "depth": [1, 2], "max_candidates": 8}


@dataclass(frozen=True)
class Phone:
    """One guess at the unknowns, and a storage fitted to a throughput without prefetching."""

    host_ms: int
    cache: Fraction
    tokens_per_s: float

    @cached_property
    def profile(self) -> Profile:
        """The phone with the storage that gives the throughput; waiting is bytes over bandwidth."""
        guess = _profile(self.host_ms, 10**9)
        found = self._run(guess, "none")
        parts = found["time_breakdown_ms"]
        wanted = 1000 / self.tokens_per_s - parts["dense"] - parts["expert"]
        return _profile(self.host_ms, round(10**9 * parts["wait"] / wanted))

    def run(self, prefetch: Any) -> dict[str, Any]:
        """Return the metrics with *prefetch*."""
        return self._run(self.profile, prefetch)

    def gain(self, prefetch: Any) -> float:
        """Return how many more tokens per second *prefetch* gives than the fit without it."""
        return float(1000 / self.tokens_per_s / self.run(prefetch)["tpot_ms"] - 1)

    def _run(self, profile: Profile, prefetch: Any) -> dict[str, Any]:
        policy = {"eviction": "lru", "prefetch": prefetch}
        setting = Setting(profile, policy, {"dram": self.cache}, weights=WEIGHTS)
        return simulate(_source(), setting).metrics


@register("specprefetch")
def study(paper: Paper) -> list[Row]:
    """Compare throughput, gains and ready recall over the range of what is not published."""
    geometry = load_geometry(MODEL)
    each = expert_bytes(geometry, WEIGHTS)
    about = [
        f"unknowns: {HOST_MS[0]} to {HOST_MS[-1]} ms of host time a layer, a cache of "
        f"{float(CACHES[0]):.0%} to {float(CACHES[-1]):.0%} of the experts, LRU over all layers",
        "each storage's bandwidth is fitted to its throughput without prefetching, to nothing else",
        "routing is synthetic (skew 1, reuse 0.3); predictions are drawn at the recall of the "
        "published training log, and cost what the low-rank predictor costs",
    ]

    def band(name: str, found: list[float], kind: Any = "prediction") -> Row:
        middle = sorted(found)[len(found) // 2]
        return row(
            paper, name, middle, low=min(found), high=max(found), kind=kind, assumptions=about
        )

    fitted = {storage: list(phones(storage)) for storage in BASELINES}
    nvme = fitted["nvme"]
    naive, window = ([phone.run(how) for phone in nvme] for how in (NAIVE, WINDOW))

    def tokens(prefetch: Any) -> list[float]:
        return [1000 / phone.run(prefetch)["tpot_ms"] for phone in nvme]

    naive_16 = NAIVE | {"budget": 16}
    return [
        row(paper, "expert_mb", each[0] / 1e6),
        row(paper, "store_gb", geometry.n_experts * sum(each) / 1e9),
        band("tokens_per_s_none", tokens("none"), "fitted"),
        band("tokens_per_s_predictor_only", tokens({"kind": "predictor-only", "depth": 2})),
        *(
            band(f"gain_{storage}", [phone.gain(WINDOW) for phone in there])
            for storage, there in fitted.items()
        ),
        band("ready_recall_naive", [found["ready_recall"] for found in naive]),
        band("ready_recall_window", [found["ready_recall"] for found in window]),
        band("naive_16_to_8", [
            eight["tpot_ms"] / phone.run(naive_16)["tpot_ms"]
            for phone, eight in zip(nvme, naive, strict=True)
        ]),
    ]  # fmt: skip


def phones(storage: str) -> Iterator[Phone]:
    """Yield a phone for every pair of unknowns, its *storage* fitted."""
    for host_ms in HOST_MS:
        for cache in CACHES:
            yield Phone(host_ms, cache, BASELINES[storage])


def _source() -> Annotated:
    """Return routing with drawn predictions that cost what the low-rank predictor costs."""
    geometry = load_geometry(MODEL)
    routing = ArrayTrace.of(Synthetic(geometry, tokens=TOKENS, seed=SEED))
    made = Annotated(routing, create({"kind": "recall-model", "recall": RECALL}))
    entries = create("low-rank").entries(geometry)
    made.header = made.header.model_copy(update={"predictors": entries})
    return made


def _profile(host_ms: int, bytes_per_s: int) -> Profile:
    data = load_profile(MACHINE).model_dump(mode="json")
    data["compute"]["gpu"]["host_time_per_layer"] = f"{host_ms} ms"
    data["links"][0]["bandwidth"] = f"{bytes_per_s} B/s"
    data["tiers"]["flash"]["bandwidth"] = f"{bytes_per_s} B/s"
    return Profile.model_validate(data)
