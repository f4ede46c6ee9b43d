"""Figures of every preset on two machines, written down.

They pin nothing that a formula proves elsewhere; they make a change of any figure a line in a diff.
`pytest tests/golden --update-golden` rewrites them.
"""

import json
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from moetier.sim.hardware import load_profile
from moetier.sim.policy.compose import compose, presets
from moetier.sim.run import Setting, simulate
from moetier.traces.geometry import load_geometry
from moetier.traces.io import ArrayTrace
from moetier.traces.synthetic import Synthetic

# A phone that streams from flash over four lanes, and a desktop that streams over one PCIe link and
# has a processor on the second tier.
MACHINES = {"phone-ufs4": "dram", "rtx-4090": "hbm"}
FIGURES = (
    "tpot_ms", "tpot_p95_ms", "ttft_ms", "miss_rate", "hit_rate_cumulative", "late_hit_rate",
    "bytes_read_total", "bytes_per_token", "stall_share", "copy_share", "prefetch_precision",
    "prefetch_coverage", "ready_recall", "prefetch_wasted_bytes", "cpu_share",
    "energy_mj_per_token", "energy_breakdown", "peak_bytes", "warmup_bytes", "lossless",
)  # fmt: skip


def test_presets(golden: Callable[[str], None]) -> None:
    """OLMoE in bf16, 16 prompt and 24 decoded tokens, a cache of a quarter of the experts."""
    trace = ArrayTrace.of(
        Synthetic(load_geometry("olmoe-1b-7b"), prompt=16, tokens=24, seed=1, scores=True)
    )
    found: dict[str, Any] = {}
    for name in presets():
        if compose(name).uses_predictions:
            continue  # this trace carries none
        for machine, tier in MACHINES.items():
            profile = load_profile(machine)
            tiers = list(profile.tiers)[:2]
            if name == "fiddler" and machine == "phone-ufs4":
                continue  # nothing computes from flash
            setting = Setting(profile, name, {tier: Fraction(1, 4)}, tiers=tiers)
            metrics = simulate(trace, setting).metrics
            found.setdefault(name, {})[machine] = {key: short(metrics[key]) for key in FIGURES}

    golden(json.dumps(found, indent=1) + "\n")


def short(value: Any) -> Any:
    """Keep nine digits of a float, so that the last bit of a mean may differ between machines."""
    if isinstance(value, dict):
        return {key: short(item) for key, item in value.items()}
    return float(f"{value:.9g}") if isinstance(value, float) else value
