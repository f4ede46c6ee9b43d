"""The disk machine decides, moves and computes what a simulation says; only its times are real."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moetier.sim.layout import Layout
from moetier.sim.machine.base import Span
from moetier.sim.plan import LayerPlan
from moetier.sim.records import Columns
from moetier.sim.run import Result, Setting, simulate
from moetier.sim.testing import toy_profile
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.traces.synthetic import Synthetic
from moetier.validate.machines.clock import Clock
from moetier.validate.machines.direct import page_memory
from moetier.validate.machines.experts import Experts, Levels, RandomHidden, Which, WholeKernel
from moetier.validate.machines.pacing import Pace, wait_until
from moetier.validate.machines.random_weights import Bytes
from moetier.validate.machines.run import DiskMachines, disk_machine, run_on_disk
from moetier.validate.machines.slices_file import SlicesFile, write_slices
from moetier.validate.machines.slots import Slot
from moetier.validate.machines.tier import slots_for

PACE = Pace(100_000_000, 50_000)  # as the link of the profile
AHEAD = {"eviction": "lru", "prefetch": "previous-token"}
POLICIES: list[Any] = [
    "on-demand",
    {"eviction": "belady"},
    AHEAD,
    {"eviction": "static", "miss": "skip"},
    {"eviction": "lru", "warmup": "random"},
    {"eviction": "double-buffer"},
]
TIMES = {"start_ns", "end_ns", "dense_ns", "wait_ns", "copy_ns", "expert_ns"}
LATE = {"late_hits", "dropped_bytes"}  # a matter of timing


@dataclass
class Seen:
    """What could be seen of a run."""

    plans: list[LayerPlan] = field(default_factory=list)
    blocks: list[Columns] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    result: Result | None = None

    @property
    def rows(self) -> Columns:
        """Return the records."""
        return {name: np.concatenate([b[name] for b in self.blocks]) for name in self.blocks[0]}

    @property
    def log(self) -> list[object]:
        """Return every decision."""
        return [
            (
                p.batch.step, p.batch.layer, p.needed, p.missing, p.fetch, list(p.prefetch),
                list(p.skip), list(p.evicted), list(p.replaced), p.warmup_bytes, p.resident,
            )
            for p in self.plans
        ]  # fmt: skip

    @property
    def observers(self) -> dict[str, Any]:
        """Return the arguments of a run that fill this in."""
        return {
            "on_plan": self.plans.append,
            "sinks": [self.blocks.append],
            "on_span": self.spans.append,
        }


def both(source: Synthetic, setting: Setting, path: Path, **disk: Any) -> tuple[Seen, Seen]:
    sim, real = Seen(), Seen()
    sim.result = simulate(source, setting, **sim.observers)
    real.result = run_on_disk(source, setting, path, pace=PACE, **disk, **real.observers)
    return sim, real


@pytest.mark.parametrize("share", [25, 60])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_decisions_and_bytes_are_those_of_a_simulation(
    policy: Any, share: int, packed: Path, source: Synthetic, setting: Callable[..., Setting]
) -> None:
    sim, real = both(source, setting(policy, share), packed)

    assert real.log == sim.log

    rows, expected = real.rows, sim.rows
    for name in expected.keys() - TIMES - LATE:
        if not name.startswith("energy"):  # energy follows time
            assert rows[name].tolist() == expected[name].tolist(), name


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("lanes", [1, 3])
def test_records_and_spans_keep_the_rules_of_time(
    lanes: int, overlap: bool, packed: Path, source: Synthetic, setting: Callable[..., Setting]
) -> None:
    _, real = both(source, setting(AHEAD, 30, lanes, overlap=overlap), packed)
    rows = real.rows

    assert rows["start_ns"][0] == 0
    assert rows["start_ns"][1:].tolist() == rows["end_ns"][:-1].tolist()  # one after the other
    for name in TIMES:
        assert (rows[name] >= 0).all()
    assert (rows["expert_ns"] > 0).all()
    assert real.result is not None
    assert real.result.elapsed_ns >= rows["end_ns"][-1]
    if not overlap:
        assert (rows["copy_ns"] <= rows["wait_ns"]).all()

    by_lane: dict[str, list[Span]] = {}
    for span in real.spans:
        by_lane.setdefault(span.lane, []).append(span)
    assert by_lane.keys() >= {"compute", "resident in dram", "link flash to dram lane 0"}
    for lane, spans in by_lane.items():
        spans.sort(key=lambda s: (s.start, s.end))
        for before, after in pairwise(spans):
            assert before.end <= after.start, lane  # nothing is in two places

    carried = [s for s in real.spans if s.lane.startswith("link")]
    kinds = {"demand": rows["fetch_bytes"].sum(), "prefetch": rows["prefetch_bytes"].sum()}
    moved = sum(kinds.values()) - rows["dropped_bytes"].sum()
    assert sum(s.info["bytes"] for s in carried) == moved  # type: ignore[misc]


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_batch_waits_at_least_as_long_as_the_pace_of_its_copies(
    lanes: int, packed: Path, source: Synthetic, setting: Callable[..., Setting]
) -> None:
    _, real = both(source, setting("on-demand", 30, lanes), packed)
    rounds = -(-(rows := real.rows)["misses"] // lanes)
    fetching = rounds > 0

    assert fetching.any()
    assert (rows["copy_ns"] >= rounds * PACE.ns(12_288))[fetching].all()
    assert (rows["copy_ns"][~fetching] == 0).all()
    assert (rows["wait_ns"] >= rows["copy_ns"]).all()


def test_with_overlap_experts_begin_before_the_last_slice_has_landed(
    packed: Path, source: Synthetic, setting: Callable[..., Setting]
) -> None:
    _, real = both(source, setting("on-demand", 30, overlap=True), packed)
    several = [p for p in real.plans if len(p.needed) > len(p.missing) > 0]
    first = several[0].batch
    at = {"step": first.step, "layer": first.layer}
    mine = [s for s in real.spans if s.lane == "compute" and s.info == at]
    ran = [s.name for s in mine if s.name.startswith("expert ")]
    resident = [s % 8 for s in several[0].needed if s not in several[0].missing]

    assert ran[: len(resident)] == [f"expert {e}" for e in resident]  # before any wait
    assert len(ran) == len(several[0].needed)

    for plan in (p for p in real.plans if not p.missing):  # then in the order of the plan
        at = {"step": plan.batch.step, "layer": plan.batch.layer}
        mine = [s for s in real.spans if s.lane == "compute" and s.info == at]

        ran = [s.name for s in mine if s.name.startswith("expert ")]

        assert ran == [f"expert {s % 8}" for s in plan.needed]


def expected_output(file: SlicesFile, plan: LayerPlan) -> torch.Tensor:
    """Compute the batch of *plan* from the file, all its experts at once."""
    index = file.index
    experts = Experts(WholeKernel(index.geometry, index.weights))
    x = RandomHidden(index.geometry.hidden or 0, torch.bfloat16, 0)(plan.batch)
    found = [s for s in plan.needed if s not in plan.skip]
    routed = experts.routed(plan.batch, [s % 8 for s in found])
    outputs = {}
    for s in found:
        slot = Slot(page_memory(index.nbytes[s]), index.nbytes[s])
        with file.path.open("rb") as plain:
            plain.seek(index.offsets[s])
            plain.readinto(slot.memory)
        outputs[s % 8] = experts.run([slot], routed[s % 8], x)
    return experts.add_up(outputs, routed, x)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", [AHEAD, {"eviction": "static", "miss": "skip"}], ids=str)
def test_what_is_computed_is_the_experts_of_the_file_bit_by_bit(
    policy: Any, overlap: bool, packed: Path, source: Synthetic, setting: Callable[..., Setting]
) -> None:
    compared = 0
    last: list[LayerPlan] = []
    with disk_machine(packed, pace=PACE) as machines, SlicesFile(packed) as file:

        def compare(plan: LayerPlan) -> None:
            nonlocal compared
            if last:  # the machine has performed it by now
                output = machines.machines[0].output
                assert output is not None
                assert torch.equal(output, expected_output(file, last[0]))
                compared += 1
            last[:] = [plan]

        simulate(source, setting(policy, 30, overlap=overlap), machine=machines, on_plan=compare)

    assert compared == 13 * 3 - 1


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_memory_stays_within_what_was_set_aside(
    policy: Any, packed: Path, source: Synthetic, setting: Callable[..., Setting]
) -> None:
    chosen = setting(policy, 25)
    stage = simulate(source, chosen).stage
    limit = slots_for(stage.layout, stage.capacities[0], 1)

    assert limit < stage.layout.total_bytes  # so that the bound binds

    with disk_machine(packed, pace=PACE, slot_bytes=limit) as machines:
        simulate(source, chosen, machine=machines)
        machine = machines.machines[0]
        kept = machine.slots.lent

        assert machine.slots.peak <= limit
        assert kept <= limit - 12_288  # what is in flight for nobody has come back


def test_too_little_memory_names_the_bytes_and_ends(
    packed: Path, source: Synthetic, setting: Callable[..., Setting]
) -> None:
    with (
        disk_machine(packed, slot_bytes=2 * 12_288) as machines,
        pytest.raises(InputError, match="36 KiB are needed for slices, and 24 KiB are set aside"),
    ):
        simulate(source, setting(), machine=machines)


def test_warm_up_costs_no_time(
    packed: Path, geometry: Geometry, setting: Callable[..., Setting]
) -> None:
    """What warm-up made resident is read with the clock stopped, and not over a lane."""
    seen = Seen()
    run_on_disk(
        Synthetic(geometry, tokens=4),
        setting({"eviction": "lru", "warmup": "random"}, 100),
        packed,
        pace=Pace(10_000),  # a second for each slice, were one to go over the lane
        **seen.observers,
    )

    assert seen.rows["warmup_bytes"].sum() == 24 * 12_288
    assert seen.rows["misses"].sum() == seen.rows["copy_ns"].sum() == 0
    assert not [s for s in seen.spans if s.lane.startswith("link")]


def test_the_clock_stands_still_while_warm_slices_are_read(
    packed: Path,
    geometry: Geometry,
    setting: Callable[..., Setting],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wall = Clock()
    really, spent = SlicesFile.read, []

    def slowly(file: SlicesFile, slice_id: int, slot: Slot) -> None:
        begin = wall.now()
        wait_until(begin + 10_000_000, wall.now)
        really(file, slice_id, slot)
        spent.append(wall.now() - begin)

    warm = setting({"eviction": "lru", "warmup": "random"}, 100)
    with disk_machine(packed) as machines:
        monkeypatch.setattr(SlicesFile, "read", slowly)
        begin = wall.now()
        result = simulate(Synthetic(geometry, tokens=4), warm, machine=machines)
        took = wall.now() - begin

    assert len(spent) > 6
    assert result.elapsed_ns <= took - sum(spent)


def test_a_policy_may_ask_how_late_the_machine_is(
    packed: Path, geometry: Geometry, setting: Callable[..., Setting]
) -> None:
    cancelling = {"eviction": "lru", "prefetch": {"kind": "previous-token", "cancel": True}}
    routing = Synthetic(geometry, prompt=6, tokens=12, skew=0.0, reuse=0.0)
    seen = Seen()
    run_on_disk(routing, setting(cancelling, 25), packed, pace=Pace(2_000_000), **seen.observers)
    rows = seen.rows

    assert rows["cancelled_bytes"].sum() > 0
    moved = sum(s.info["bytes"] for s in seen.spans if s.lane.startswith("link"))  # type: ignore[misc]
    ordered = rows["fetch_bytes"].sum() + rows["prefetch_bytes"].sum()
    assert moved == ordered - rows["cancelled_bytes"].sum() - rows["dropped_bytes"].sum()


def test_lateness_is_what_the_lanes_say(
    packed: Path, source: Synthetic, setting: Callable[..., Setting]
) -> None:
    stage = simulate(source, setting()).stage
    batch = next(iter(source.batches()))
    with disk_machine(packed, pace=Pace(10_000_000)) as machines:  # 1.2 ms for a slice
        machine = machines(stage.hierarchy, stage.costs, stage.layout, None)
        plan = LayerPlan(batch, needed := sorted(set(batch.experts)), needed)
        plan.prefetch = [8, 9, 10, 11]
        machine.execute(plan)

        assert machine.landed(needed[0])
        assert machine.queued_bytes() >= 3 * 12_288
        assert machine.cancel([11, needed[0]]) == [11]
        assert machine.finish() >= 7 * 1_228_800
        assert machine.queued_bytes() == 0
        assert all(machine.landed(s) for s in plan.prefetch)


def test_prefetches_that_have_not_landed_are_late(
    packed: Path, source: Synthetic, setting: Callable[..., Setting]
) -> None:
    stage = simulate(source, setting()).stage
    batch = next(iter(source.batches()))
    with disk_machine(packed, pace=Pace(500_000)) as machines:  # 25 ms for a slice
        machine = machines(stage.hierarchy, stage.costs, stage.layout, None)
        first = LayerPlan(batch, needed := sorted(set(batch.experts)), needed)
        first.prefetch = [8, 9, 10, 11]
        machine.execute(first)
        second = LayerPlan(replace(batch, layer=1, experts=[2, 3, 4] * 4), [10, 11, 12], [12])
        timing = machine.execute(second)

        assert timing.late == 2
        assert timing.copy >= 3 * 24_576_000  # both promoted, and the one that was fetched


class Parts:
    """A kernel for experts in two parts, which notes of which it had only the first."""

    name = "parts"
    dtype = torch.float32
    levels: Levels = ((0, 1),)

    def __init__(self) -> None:
        """Begin with nothing noted."""
        self.seen: list[tuple[bytes | None, ...]] = []

    def run(
        self, buffers: Sequence[torch.Tensor | None], x: torch.Tensor, which: Which | None = None
    ) -> torch.Tensor:
        """Note the first byte of each part."""
        self.seen.append(tuple(None if b is None else bytes(b[:1].numpy()) for b in buffers))
        return x

    def made_up(self, part: int, *seed: int) -> Bytes:
        """Make nothing."""
        raise NotImplementedError


def test_parts_go_to_the_kernel_in_order_and_missing_ones_as_none(
    tmp_path: Path, geometry: Geometry, source: Synthetic, setting: Callable[..., Setting]
) -> None:
    layout = Layout([[3000, 1000]] * 3, 8)
    path = tmp_path / "parts.slices"

    def content(s: int) -> bytes:
        return bytes([s]) * layout.nbytes[s]

    write_slices(path, layout, content, geometry=geometry, weights="bf16", source="a test")
    stage = simulate(source, setting()).stage
    batch = replace(next(iter(source.batches())), n_tokens=1, context=1, experts=[1, 4])
    kernel = Parts()
    with disk_machine(path, kernel=kernel) as machines:
        machine = machines(stage.hierarchy, stage.costs, layout, None)
        plan = LayerPlan(batch, [8, 9, 2, 3], [8, 9, 2, 3])
        plan.fetch, plan.degrade = [8, 2, 3], [9]
        machine.execute(plan)

    assert kernel.seen == [(b"\x02", b"\x03"), (b"\x08", None)]


def test_what_leaves_makes_room_before_what_comes(
    packed: Path, source: Synthetic, setting: Callable[..., Setting]
) -> None:
    stage = simulate(source, setting()).stage
    batch = replace(next(iter(source.batches())), n_tokens=1, context=1)
    with disk_machine(packed, slot_bytes=2 * 12_288) as machines:
        machine = machines(stage.hierarchy, stage.costs, stage.layout, None)
        machine.execute(LayerPlan(replace(batch, experts=[0, 1]), [0, 1], [0, 1]))
        second = LayerPlan(replace(batch, experts=[2, 3]), [2, 3], [2, 3])
        second.evicted = [0, 1]
        machine.execute(second)

        assert machines.machines[0].slots.lent == 2 * 12_288


def test_a_run_says_how_it_was_made(
    packed: Path, source: Synthetic, setting: Callable[..., Setting]
) -> None:
    sim, real = both(source, setting(), packed, threads=2)
    assert sim.result is not None
    assert real.result is not None
    said = " / ".join(real.result.known_limitations)

    for part in ("time is measured", "O_DIRECT", "2 threads", "synthetic", "95.4 MiB/s"):
        assert part in said
    assert "time and energy are modelled" in sim.result.known_limitations[0]
    assert "time and energy are modelled" not in said
    assert "roofline" not in said
    assert torch.get_num_threads() == 1  # as before


def test_a_pace_that_was_not_kept_is_said(
    packed: Path, source: Synthetic, setting: Callable[..., Setting]
) -> None:
    result = run_on_disk(source, setting(), packed, pace=Pace(1 << 50))

    assert any("longer than the pace allows" in said for said in result.known_limitations)


def test_without_a_pace_it_reads_as_fast_as_it_can(
    packed: Path, source: Synthetic, setting: Callable[..., Setting]
) -> None:
    sim, real = Seen(), Seen()
    simulate(source, setting(), **sim.observers)
    result = run_on_disk(source, setting(), packed, lanes=2, **real.observers)

    assert real.log == sim.log
    assert not any("held to" in said for said in result.known_limitations)


def test_more_than_two_tiers_are_refused(packed: Path, source: Synthetic) -> None:
    three = toy_profile(three={"bandwidth": "1 GB/s"}, hbm={"capacity": "1 GiB"})
    with disk_machine(packed) as machines, pytest.raises(InputError, match="has two tiers, not 3"):
        simulate(source, Setting(three), machine=machines)


def test_a_policy_that_computes_on_the_disk_is_refused(packed: Path, source: Synthetic) -> None:
    machine = toy_profile()
    with (
        disk_machine(packed) as machines,
        pytest.raises(InputError, match="nothing computes from 'dram' on"),
    ):
        simulate(source, Setting(machine, {"miss": "cpu"}), machine=machines)


def test_a_file_of_another_model_is_refused(
    packed: Path, source: Synthetic, setting: Callable[..., Setting]
) -> None:
    coarse = {"eviction": "lru", "precision": {"kind": "uniform", "bits": 4}}
    with pytest.raises(InputError, match="holds 24 slices of 288 KiB, and the run has 24 of 83"):
        run_on_disk(source, setting(coarse), packed)
    with pytest.raises(InputError, match="experts stored as int8 need a kernel of their own"):
        run_on_disk(source, setting(weights="int8"), packed)


def test_machines_are_closed_whatever_happened(
    packed: Path, source: Synthetic, setting: Callable[..., Setting]
) -> None:
    made: list[DiskMachines] = []
    with pytest.raises(KeyError), disk_machine(packed) as machines:  # noqa: PT012  (it is the point)
        made.append(machines)
        stage = simulate(source, setting(), machine=machines).stage
        machines(stage.hierarchy, stage.costs, stage.layout, None)
        raise KeyError

    assert len(made[0].machines) == 2
    for machine in made[0].machines:
        machine.close()  # again does nothing
