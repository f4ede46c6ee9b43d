"""The CUDA machine decides, moves and computes what a simulation says, on a fake device."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moetier.sim.machine.base import Span
from moetier.sim.plan import LayerPlan
from moetier.sim.records import Columns
from moetier.sim.run import Setting, simulate
from moetier.sim.testing import toy_profile
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.traces.predictors import create
from moetier.traces.predictors.annotate import Annotated
from moetier.traces.synthetic import Synthetic
from moetier.validate.compare.decisions import Decisions
from moetier.validate.compare.grid import BYTES
from moetier.validate.machines.cuda.fake import FakeDevice
from moetier.validate.machines.cuda.run import CudaRuns, run_on_cuda
from moetier.validate.machines.pacing import Pace
from moetier.validate.machines.run import pack_synthetic, run_on_disk

Devices = Callable[..., FakeDevice]
Settings = Callable[..., Setting]
AHEAD = {"eviction": "lru", "prefetch": "previous-token"}
SLICES = {
    "precision": {"kind": "bit-sliced", "bits": [8, 4], "theta": 0.25},
    "eviction": "slice-aware",
    "miss": {"kind": "degrade", "miss_rate": "10 %"},
}
GUESSING = {
    "routing": "speculative",
    "prefetch": {"kind": "predicted", "depth": 1},
    "eviction": "double-buffer",
}
PACE_NS = Pace(100_000_000, 50_000).ns(12_288)  # of an expert, as the fixture's devices copy it
POLICIES: list[Any] = [
    "on-demand",
    {"eviction": "lfu"},
    {"eviction": "belady"},
    AHEAD,
    {"eviction": "static", "miss": "skip"},
    {"eviction": "lru", "warmup": "random"},
    {"eviction": "double-buffer"},
    SLICES,
    {"precision": {"kind": "uniform", "bits": 4}},
    {"precision": "hobbit"},
    GUESSING,
]


class Seen:
    """What could be seen of a run."""

    def __init__(self) -> None:
        """See nothing yet."""
        self.plans: list[LayerPlan] = []
        self.blocks: list[Columns] = []
        self.spans: list[Span] = []
        self.observers: dict[str, Any] = {
            "on_plan": self.plans.append,
            "sinks": [self.blocks.append],
            "on_span": self.spans.append,
        }

    @property
    def rows(self) -> Columns:
        """Return the records."""
        return {name: np.concatenate([b[name] for b in self.blocks]) for name in self.blocks[0]}


def predicted(source: Any) -> Any:
    return Annotated(source, create({"kind": "recall-model", "recall": [0.8]}, "predictor"))


@pytest.mark.parametrize("share", [25, 60])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_decisions_and_bytes_are_those_of_a_simulation(
    policy: Any, share: int, device: Devices, geometry: Geometry, setting: Settings
) -> None:
    source = predicted(Synthetic(geometry, prompt=6, tokens=12, skew=1.0, reuse=0.4, scores=True))
    sim, real = Seen(), Seen()
    virtual = simulate(source, setting(policy, share), **sim.observers)
    result = run_on_cuda(source, setting(policy, share), device(), **real.observers)

    assert Decisions.of(sim.plans).first_difference(Decisions.of(real.plans)) is None
    for name in BYTES:
        assert real.rows[name].tolist() == sim.rows[name].tolist(), name
    assert len(real.plans) == 13 * 3
    assert result.metrics["miss_rate"] == virtual.metrics["miss_rate"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("lanes", [1, 3])
def test_records_and_spans_keep_the_rules_of_time(
    lanes: int, overlap: bool, device: Devices, source: Synthetic, setting: Settings
) -> None:
    real = Seen()
    found = run_on_cuda(
        source, setting(AHEAD, 30, lanes, overlap=overlap), device(), **real.observers
    )
    rows = real.rows

    assert rows["start_ns"][0] == 0
    assert rows["start_ns"][1:].tolist() == rows["end_ns"][:-1].tolist()  # one after the other
    for name in ("dense_ns", "wait_ns", "copy_ns"):
        assert (rows[name] >= 0).all(), name
    assert (rows["expert_ns"] > 0).all()
    assert found.elapsed_ns >= rows["end_ns"][-1]

    by_lane: dict[str, list[Span]] = {}
    for span in real.spans:
        by_lane.setdefault(span.lane, []).append(span)
    for lane, spans in by_lane.items():
        spans.sort(key=lambda s: (s.start, s.end))
        for before, after in pairwise(spans):
            assert before.end <= after.start, lane  # nothing is in two places

    carried = [s for s in real.spans if s.lane.startswith("link")]
    moved = rows["fetch_bytes"].sum() + rows["prefetch_bytes"].sum() - rows["dropped_bytes"].sum()
    assert sum(s.info["bytes"] for s in carried) == moved  # type: ignore[misc]
    for s in carried:
        assert s.end - s.start >= 0.9 * PACE_NS  # a copy takes what the stream is held to


def test_prefetches_are_copied_while_experts_are_computed(
    device: Devices, geometry: Geometry, setting: Settings
) -> None:
    """In the wall clock."""
    routing = Synthetic(geometry, prompt=2, tokens=24, skew=0.0, reuse=0.0)
    ahead, late = Seen(), Seen()
    slow = Pace(20_000_000, 0)
    known = {"eviction": "lru", "prefetch": "oracle"}
    run_on_cuda(routing, setting(known, 60), device(pace=slow), **ahead.observers)
    run_on_cuda(routing, setting("on-demand", 60), device(pace=slow), **late.observers)

    copies = [s for s in ahead.spans if s.info.get("cause") == "prefetch"]
    pieces = [s for s in ahead.spans if s.lane == "compute" and s.name in ("experts", "dense")]
    shared = [
        min(copy.end, piece.end) - max(copy.start, piece.start)
        for copy in copies
        for piece in pieces
    ]

    assert sum(ns > 0 for ns in shared) > 10  # pieces of compute beside a copy
    assert not [s for s in late.spans if s.info.get("cause") == "prefetch"]


def test_with_overlap_experts_begin_before_the_last_slice_has_landed(
    device: Devices, source: Synthetic, setting: Settings
) -> None:
    real = Seen()
    run_on_cuda(source, setting("on-demand", 30, overlap=True), device(), **real.observers)
    plan = next(p for p in real.plans if len(p.needed) > len(p.missing) > 0)
    at = {"step": plan.batch.step, "layer": plan.batch.layer}
    mine = [s for s in real.spans if s.lane == "compute" and s.info == at]
    ran = [s.name for s in mine if s.name.startswith("expert ")]
    resident = [s % 8 for s in plan.needed if s not in plan.missing]

    assert ran[: len(resident)] == [f"expert {e}" for e in resident]  # before any wait
    assert len(ran) == len(plan.needed)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", [AHEAD, SLICES], ids=str)
def test_outputs_are_those_of_the_disk_machine_bit_by_bit(
    policy: Any,
    overlap: bool,
    device: Devices,
    geometry: Geometry,
    setting: Settings,
    keep: Callable[[list[torch.Tensor]], Callable[[Any], Any]],
    tmp_path: Path,
) -> None:
    """Both make the same weights of one seed, so slices went where they belong."""
    source = Synthetic(geometry, prompt=6, tokens=8, skew=1.0, reuse=0.4, scores=True)
    chosen = setting(policy, 30, overlap=overlap)
    path = tmp_path / "same.slices"
    pack_synthetic(path, source, chosen, seed=0)
    outputs: list[list[torch.Tensor]] = [[], []]

    run_on_cuda(source, chosen, device(), around=keep(outputs[0]))
    run_on_disk(source, chosen, path, around=keep(outputs[1]))

    assert len(outputs[0]) == len(outputs[1]) == 9 * 3
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def test_slices_and_dense_weights_are_kept_from_run_to_run(
    device: Devices, source: Synthetic, setting: Settings
) -> None:
    mine = device()
    with CudaRuns(mine) as runs:
        runs.run(source, setting())
        held = mine.lent
        runs.run(source, setting({"eviction": "lfu"}, 25))

        assert mine.lent == held > 0  # slots have come back, and nothing was pinned again

        runs.run(source, setting(SLICES))

        assert mine.lent > held


def test_warm_up_costs_no_time(device: Devices, geometry: Geometry, setting: Settings) -> None:
    seen = Seen()
    run_on_cuda(
        Synthetic(geometry, tokens=4),
        setting({"eviction": "lru", "warmup": "random"}, 100),
        device(),
        **seen.observers,
    )

    assert seen.rows["warmup_bytes"].sum() == 24 * 12_288
    assert seen.rows["misses"].sum() == seen.rows["copy_ns"].sum() == 0
    assert not [s for s in seen.spans if s.lane.startswith("link")]


def test_energy_is_counted_over_runs_that_are_long_enough(
    device: Devices, source: Synthetic, setting: Settings
) -> None:
    short = run_on_cuda(source, setting(), device(counts_energy=True))
    counted = run_on_cuda(source, setting(), device(counts_energy=True, energy_window=1000))
    silent = run_on_cuda(source, setting(), device(energy_window=1000))

    assert short.elapsed_ns < 1_000_000_000
    assert short.energy_uj is silent.energy_uj is None
    warm = setting({"eviction": "lru", "warmup": "random"}, 100)
    stood_still = run_on_cuda(source, warm, device(counts_energy=True, energy_window=1000))

    assert stood_still.energy_uj is None  # what warm-up brought is in the counter, and in no record
    assert counted.energy_uj == pytest.approx(counted.elapsed_ns * 50 / 1000, rel=0.05)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            {"policy": {"precision": {"kind": "channels", "reads": "60 %", "recovery": "none"}}},
            "code for the CPU",
        ),
        ({"weights": "q4_0"}, "q4_0 need a kernel of their own"),
        ({"profile": toy_profile(three={"bandwidth": "1 GB/s"})}, "has two tiers, not 3"),
        ({"policy": {"miss": "cpu"}, "profile": toy_profile(cpu={})}, "nothing computes from"),
    ],
)
def test_what_it_cannot_do_is_refused(
    given: dict[str, Any], problem: str, device: Devices, source: Synthetic, setting: Settings
) -> None:
    usual = setting()
    data: dict[str, Any] = vars(usual) | {"capacity": {}} | given
    if "profile" not in given:
        data["capacity"] = {"dram": Fraction(1, 2)}

    with pytest.raises(InputError, match=problem):
        run_on_cuda(source, Setting(**data), device())


def test_what_a_run_says_of_itself_names_the_device(
    device: Devices, source: Synthetic, setting: Settings
) -> None:
    said = " ".join(run_on_cuda(source, setting(), device()).known_limitations)

    assert "time is measured on fake device (threads on the CPU; not a GPU)" in said
    assert "time and energy are modelled, not measured" not in said
