"""This module describes what a result's columns mean: label, unit, and which way is better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Direction = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Quantity:
    """A column as figures and tables show it; values are divided by *scale* for *unit*."""

    label: str
    unit: str = ""
    better: Direction | None = "lower"
    scale: float = 1.0
    per: str = ""  # the denominator, in words
    error: str | None = None  # the column of its standard error
    interval: tuple[str, str] | None = None  # the columns of its confidence interval

    @property
    def title(self) -> str:
        """Return label and unit."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


_MB, _GB = 1e6, 1e9
_SHARE = "share"

QUANTITIES: dict[str, Quantity] = {
    "tpot_ms": Quantity("time per output token", "ms", per="decode steps but the first"),
    "tpot_p50_ms": Quantity("median time per output token", "ms"),
    "tpot_p95_ms": Quantity("95th percentile of time per output token", "ms"),
    "tpot_p99_ms": Quantity("99th percentile of time per output token", "ms"),
    "ttft_ms": Quantity("time to first token", "ms", per="prefill steps"),
    "tokens_per_s": Quantity("decode throughput", "tokens/s", "higher", per="decode time"),
    "tokens": Quantity("decoded tokens", better=None),
    "miss_rate": Quantity("miss rate", _SHARE, per="decode lookups"),
    "byte_miss_rate": Quantity("byte miss rate", _SHARE, per="decode bytes looked up"),
    "late_hit_rate": Quantity("late hits", _SHARE, per="decode lookups"),
    "miss_rate_prefill": Quantity("prefill miss rate", _SHARE, per="prefill lookups"),
    "byte_miss_rate_prefill": Quantity("prefill byte miss rate", _SHARE, per="prefill bytes"),
    "compulsory_miss_rate": Quantity("compulsory misses", _SHARE, per="decode lookups"),
    "hit_rate_decode": Quantity("hit rate, decode", _SHARE, "higher", per="decode lookups"),
    "hit_rate_cumulative": Quantity("hit rate", _SHARE, "higher", per="prefill + decode lookups"),
    "decode_bytes_looked_up": Quantity("bytes looked up", "GB", scale=_GB, per="decode"),
    "bytes_read_total": Quantity("bytes read", "GB", scale=_GB, per="prefill + decode"),
    "bytes_per_token": Quantity("bytes read per token", "MB", scale=_MB, per="decoded tokens"),
    "demand_bytes": Quantity("bytes fetched on demand", "GB", scale=_GB),
    "prefetch_bytes": Quantity("bytes prefetched", "GB", scale=_GB),
    "prefetch_wasted_bytes": Quantity("prefetched bytes not used", "GB", scale=_GB),
    "lower_bytes": Quantity("bytes read from the lowest tier", "GB", scale=_GB),
    "stall_share": Quantity("stall share", _SHARE, per="decode time"),
    "copy_share": Quantity("copy share", _SHARE, per="decode time"),
    "prefetch_precision": Quantity("prefetch precision", _SHARE, "higher", per="prefetches issued"),
    "prefetch_coverage": Quantity("prefetch coverage", _SHARE, "higher", per="used + misses"),
    "ready_recall": Quantity("ready recall", _SHARE, "higher", per="used + misses"),
    "lower_hit_rate": Quantity("hit rate of the second tier", _SHARE, "higher", per="its lookups"),
    "miss_rate_msb": Quantity("miss rate of MSB slices", _SHARE, per="their decode lookups"),
    "miss_rate_lsb": Quantity("miss rate of LSB slices", _SHARE, per="their decode lookups"),
    "byte_fetch_rate": Quantity("bytes fetched on demand", _SHARE, per="decode bytes looked up"),
    "weight_read_share": Quantity("expert bytes read", _SHARE, per="decode bytes looked up"),
    "degraded_share": Quantity("done without", _SHARE, per="decode lookups"),
    "skipped_share": Quantity("skipped", _SHARE, per="decode lookups"),
    "cpu_share": Quantity("run on the CPU", _SHARE, None, per="decode lookups"),
    "energy_mj_per_token": Quantity("energy per token", "mJ", per="decoded tokens"),
    "energy_mj_prefill": Quantity("energy of the prefill", "mJ"),
    "peak_bytes": Quantity("peak residency", "GB", scale=_GB),
    "accuracy": Quantity(
        "accuracy", _SHARE, "higher", per="items with an answer", error="accuracy_se"
    ),
    "accuracy_se": Quantity("standard error of the accuracy", _SHARE, per="items"),
    "accuracy_difference.mean": Quantity(
        "accuracy above the plain model's",
        _SHARE,
        "higher",
        per="items with an answer",
        interval=("accuracy_difference.low", "accuracy_difference.high"),
    ),
    "nll": Quantity("negative log-likelihood of the answer", "nats", error="nll_se"),
    "nll_se": Quantity("standard error of the likelihood", "nats"),
    "nll_difference.mean": Quantity(
        "likelihood lost to the policy",
        "nats",
        interval=("nll_difference.low", "nll_difference.high"),
    ),
    "repetition_share": Quantity("long texts that fall into a loop", _SHARE, per="long texts"),
    "plain.accuracy": Quantity(
        "accuracy of the plain model", _SHARE, "higher", per="items with an answer"
    ),
    "oracle_gap": Quantity("misses above Belady's", _SHARE, per="decode lookups"),
}


def quantity(name: str) -> Quantity:
    """Return what is known of the column *name*; a capacity costs memory, so lower is better."""
    if name in QUANTITIES:
        return QUANTITIES[name]
    if name.startswith("capacity."):
        return Quantity(f"expert cache in {name.partition('.')[2]}")
    return Quantity(name.replace("_", " "), better=None)
