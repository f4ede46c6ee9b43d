"""Runs on a disk with other precisions than whole experts decide and move what simulations say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetier.sim.plan import LayerPlan
from moetier.sim.records import Columns
from moetier.sim.run import Result, Setting, simulate
from moetier.traces.geometry import Geometry
from moetier.traces.synthetic import Synthetic
from moetier.validate.machines.pacing import Pace
from moetier.validate.machines.run import pack_synthetic, run_on_disk

PACE = Pace(100_000_000, 50_000)  # as the link of the profile
BITS = {"kind": "bit-sliced", "bits": [8, 4], "theta": 0.5}
BLOCKS = {"kind": "channels", "reads": "60 %", "recovery": "none", "unit": "block", "blocks": 4}
POLICIES: dict[str, Any] = {
    "uniform": {"eviction": "lru", "precision": {"kind": "uniform", "bits": 4}},
    "uniform, ahead": {"eviction": "lru", "precision": {"kind": "uniform", "bits": 3},
                       "prefetch": "previous-token"},
    "bit slices": {"eviction": "slice-aware", "precision": BITS},
    "bit slices, degraded": {"eviction": "slice-aware", "precision": BITS, "miss": "degrade"},
    "bit slices, warm": {"eviction": "slice-aware", "precision": BITS, "warmup": "pcw",
                         "prefetch": "previous-token"},
    "hobbit": {"eviction": "lru", "precision": {"kind": "hobbit", "t1": 0.4, "t2": 0.8}},
    "hobbit, two codes": {"eviction": "lru", "precision": {"kind": "hobbit", "high": 8, "low": 3,
                                                           "t1": 0.4, "t2": 0.8, "upgrade": True}},
    "channels": {"eviction": "lru", "precision": {"kind": "channels", "reads": "70 %", "rank": 2}},
    "blocks": {"eviction": "lru", "precision": BLOCKS},
    "blocks, ahead": {"eviction": "lru", "precision": BLOCKS, "prefetch": "previous-token"},
}  # fmt: skip
TIMING = {"start_ns", "end_ns", "dense_ns", "wait_ns", "copy_ns", "expert_ns",
          "late_hits", "dropped_bytes"}  # fmt: skip


class Weighed(Synthetic):
    """Synthetic routing with gate weights, of which one of two is above a half."""

    def batches(self) -> Any:
        """Yield the batches, weighed."""
        rng = np.random.default_rng(0)
        for batch in super().batches():
            first = rng.uniform(0.2, 0.8, batch.n_tokens).astype(np.float32)
            batch.weights = np.stack([first, 1 - first], 1).reshape(-1)
            yield batch


@pytest.fixture(scope="module")
def weighed(geometry: Geometry) -> Weighed:
    return Weighed(geometry, prompt=6, tokens=10, skew=1.0, reuse=0.4, seed=3)


def log_of(plans: list[LayerPlan]) -> list[object]:
    return [
        (p.batch.step, p.batch.layer, p.needed, p.missing, p.fetch, list(p.prefetch), list(p.skip),
         list(p.degrade), list(p.evicted), list(p.replaced), p.spared, p.resident)
        for p in plans
    ]  # fmt: skip


def seen(run: Callable[..., Result], *args: Any, **more: Any) -> tuple[list[object], Columns]:
    plans: list[LayerPlan] = []
    blocks: list[Columns] = []
    run(*args, **more, on_plan=plans.append, sinks=[blocks.append])
    return log_of(plans), {name: np.concatenate([b[name] for b in blocks]) for name in blocks[0]}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_decisions_and_bytes_are_those_of_a_simulation(
    policy: Any, weighed: Weighed, setting: Callable[..., Setting], tmp_path: Path
) -> None:
    if policy["precision"]["kind"] == "channels":
        pytest.importorskip("numba", reason="channels are computed by the extra 'kernels'")
    path, chosen = tmp_path / "mine.slices", setting(policy, 40)
    pack_synthetic(path, weighed, chosen, seed=5)
    log, rows = seen(simulate, weighed, chosen)
    real_log, real_rows = seen(run_on_disk, weighed, chosen, path, pace=PACE)

    assert real_log == log
    for name in rows.keys() - TIMING:
        if not name.startswith("energy"):  # energy follows time
            assert real_rows[name].tolist() == rows[name].tolist(), name
    assert rows["fetch_bytes"].sum() > 0
    assert (real_rows["expert_ns"] > 0).all()


def test_half_precision_really_reads_less(
    weighed: Weighed, setting: Callable[..., Setting], tmp_path: Path
) -> None:
    """What is degraded never comes over the lanes: its part of the file may hold anything."""
    path = tmp_path / "mine.slices"
    chosen = setting(POLICIES["bit slices, degraded"], 40)
    pack_synthetic(path, weighed, chosen, seed=5)
    spans: list[Any] = []
    plans: list[LayerPlan] = []
    run_on_disk(weighed, chosen, path, on_span=spans.append, on_plan=plans.append)
    moved = [span.info["slice"] for span in spans if span.lane.startswith("link")]
    asked = [s for plan in plans for s in plan.fetch]

    assert sorted(moved) == sorted(asked)
    assert sum(len(plan.degrade) for plan in plans) > 5
    assert all(s % 2 for plan in plans for s in plan.degrade)
