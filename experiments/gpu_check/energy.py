"""This module compares the energy that a simulation counts with what a device's counter says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetier.experiments.config import check_run, load_hardware, policy_label
from moetier.experiments.runs import setting_of
from moetier.experiments.sources import open_source
from moetier.sim.run import simulate

if TYPE_CHECKING:
    from moetier.validate.machines.cuda.device import Device

RUNS: list[tuple[Any, str]] = [  # policy and capacity: much, some and little to wait for
    ({"name": "LRU", "eviction": "lru"}, "10 %"),
    ({"name": "LRU", "eviction": "lru"}, "50 %"),
    ({"name": "previous token", "prefetch": "previous-token", "eviction": "fifo"}, "25 %"),
    ({"name": "LRU", "eviction": "lru"}, "100 %"),
]


def compare_energy(
    device: Device, profile: Path, geometry: str, *, layers: int, tokens: int
) -> list[dict[str, Any]]:
    """Run some policies of the first *layers* of *geometry* for *tokens* tokens; return rows.

    A row has the millijoules of the whole run, simulated and measured, and the seconds it took both
    ways; `measured_mj` is null where the device has no counter, or the run was too short for it.
    """
    from moetier.validate.machines.cuda.run import CudaRuns

    rows = []
    with CudaRuns(device, lanes=2) as runs:
        for policy, capacity in RUNS:
            run = check_run(
                {
                    "synthetic": {"geometry": geometry, "layers": layers, "tokens": tokens},
                    "hardware": str(profile),
                    "weights": "bf16",
                    "policy": policy,
                    "capacity": {"hbm": capacity},
                },
                "energy",
            )
            source, setting = open_source(run).source, setting_of(run, load_hardware(run.hardware))
            virtual, real = simulate(source, setting), runs.run(source, setting)
            simulated = _total_mj(virtual.metrics)
            measured = None if real.energy_uj is None else real.energy_uj / 1000
            rows.append(
                {
                    "policy": policy_label(policy),
                    "capacity": capacity,
                    "simulated_s": virtual.elapsed_ns / 1e9,
                    "measured_s": real.elapsed_ns / 1e9,
                    "simulated_mj": simulated,
                    "measured_mj": measured,
                    "error": None if not measured else simulated / measured - 1,
                    "measured_on": device.name,
                }
            )
    return rows


def _total_mj(metrics: dict[str, Any]) -> float:
    """Return the energy of a whole run."""
    decode = metrics["energy_mj_per_token"] or 0
    total: float = decode * metrics["tokens"] + (metrics["energy_mj_prefill"] or 0)
    return total
