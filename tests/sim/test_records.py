"""Records: the columns, blocks, and the file that appears only when it is complete."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from moetier.sim.energy import COMPONENTS
from moetier.sim.machine.base import LayerTiming
from moetier.sim.machine.simulated import SimMachine
from moetier.sim.memory import extent_of
from moetier.sim.plan import LayerPlan
from moetier.sim.planner import Planner
from moetier.sim.records import EARLY, RARE, SCHEMA, Columns, Recorder, RecordWriter, read_records
from moetier.sim.run import Setting, drive, set_up, simulate
from moetier.sim.testing import toy_header, toy_profile, toy_trace
from moetier.traces.batch import DECODE, LayerBatch
from moetier.traces.io import ArrayTrace
from moetier.traces.predictors import create
from moetier.traces.predictors.annotate import Annotated
from moetier.traces.synthetic import Synthetic

TRACE = toy_trace(
    toy_header(layers=2, n_experts=4), [[[0], [1]], [[2], [1]], [[0], [3]]], prefill=[[[0], [0]]]
)
SETTING = Setting(toy_profile(), "previous-token", {"hbm": 120})


def rows_of(blocks: list[Columns]) -> dict[str, list[int]]:
    return {name: np.concatenate([b[name] for b in blocks]).tolist() for name in blocks[0]}


def predicted_trace() -> Annotated:
    """Return forty steps with predictions right two times in three."""
    header = toy_header(layers=3, n_experts=8)
    made = ArrayTrace(header, list(Synthetic(header.geometry, tokens=40, seed=1).columns()))
    return Annotated(made, create({"kind": "recall-model", "recall": [0.67]}))


def recorded(block_rows: int) -> list[Columns]:
    stage = set_up(TRACE.header, SETTING, extent_of(TRACE))
    blocks: list[Columns] = []
    recorder = Recorder(stage.layout, stage.energy, [blocks.append], block_rows)
    machine = SimMachine(stage.hierarchy, stage.costs, stage.layout)
    planner = Planner(stage.policy, stage.layout, stage.capacities, lateness=machine)
    drive(TRACE.batches(), planner, machine, recorder)
    recorder.flush()
    return blocks


@pytest.mark.parametrize("block_rows", [1, 3, 8, 9])
def test_blocks_hold_the_same_rows_however_long(block_rows: int) -> None:
    blocks = recorded(block_rows)

    assert len(blocks[0]["step"]) == min(block_rows, 8)
    assert rows_of(blocks) == rows_of(recorded(100))


def test_every_column_is_there_in_every_block() -> None:
    for block in recorded(3):
        assert set(block) == set(SCHEMA.names)
        assert all(values.dtype == np.int64 for values in block.values())


def test_flushing_twice_adds_nothing() -> None:
    stage = set_up(TRACE.header, SETTING, extent_of(TRACE))
    blocks: list[Columns] = []
    Recorder(stage.layout, stage.energy, [blocks.append]).flush()

    assert blocks == []


def test_a_file_holds_what_the_sinks_heard(tmp_path: Path) -> None:
    path, blocks = tmp_path / "records.parquet", list[Columns]()
    with RecordWriter(path) as writer:
        assert not path.exists()
        simulate(TRACE, SETTING, sinks=[blocks.append, writer])

    assert rows_of(list(read_records(path))) == rows_of(blocks)
    assert pq.read_schema(path).names == SCHEMA.names
    assert [len(b["step"]) for b in read_records(path, block_rows=5)] == [5, 3]


def test_a_run_that_fails_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "records.parquet"

    def fails(columns: Columns) -> None:
        raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full"), RecordWriter(path) as writer:
        simulate(TRACE, SETTING, sinks=[writer, fails])

    assert list(tmp_path.iterdir()) == []


def test_two_files_of_one_run_are_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with RecordWriter(tmp_path / name) as writer:
            simulate(TRACE, SETTING, sinks=[writer])

    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_energy_has_a_column_per_component() -> None:
    assert [name for name in SCHEMA.names if name.startswith("energy_")] == [
        f"energy_{name}_pj" for name in COMPONENTS
    ]


def plan_of(kind: str, at: int) -> LayerPlan:
    """Return a plan without demands; what it prefetches and wastes tells the rows apart."""
    batch = LayerBatch(at, DECODE, 0, 1, 9, [0], np.ones(1, np.float32))
    plan = LayerPlan(batch, [0], [])
    plan.rare, plan.early = "rare" in kind, "early" in kind
    if kind != "plain":
        plan.prefetch, plan.prefetch_used, plan.prefetch_wasted = [4, 5][: at % 3], at, 100 * at
    if plan.rare:
        plan.lower_lookups, plan.warmup_bytes = 7 * at, 1000 * at
    return plan


def columns_of(kinds: list[str], dropped: int = 0, block_rows: int = 100) -> dict[str, list[int]]:
    stage = set_up(TRACE.header, SETTING, extent_of(TRACE))
    blocks: list[Columns] = []
    recorder = Recorder(stage.layout, stage.energy, [blocks.append], block_rows)
    for at, kind in enumerate(kinds, 1):
        recorder.add(plan_of(kind, at), LayerTiming(at, 1, 2, 3, 4, at + 7, 0, dropped))
    recorder.flush()
    return rows_of(blocks)


KINDS = ["early", "rare", "plain", "rare early", "early", "plain", "rare"]


@pytest.mark.parametrize("block_rows", [1, 2, 3, 100])
def test_early_and_rare_rows_share_a_block(block_rows: int) -> None:
    size = set_up(TRACE.header, SETTING, extent_of(TRACE)).layout.size([4])
    found = columns_of(KINDS, dropped=5, block_rows=block_rows)

    assert found["step"] == [1, 2, 3, 4, 5, 6, 7]
    assert found["prefetch_issued"] == [1, 2, 0, 1, 2, 0, 1]
    assert found["prefetch_bytes"] == [n * size for n in found["prefetch_issued"]]
    assert found["prefetch_used"] == [1, 2, 0, 4, 5, 0, 7]
    assert found["prefetch_wasted_bytes"] == [100, 200, 0, 400, 500, 0, 700]
    assert found["dropped_bytes"] == [5] * 7  # which the machine says, and a plain plan may have
    assert found["lower_lookups"] == [0, 14, 0, 28, 0, 0, 49]
    assert found["warmup_bytes"] == [0, 2000, 0, 4000, 0, 0, 7000]
    others = set(RARE) - {*EARLY, "lower_lookups", "warmup_bytes"}
    assert all(not any(found[name]) for name in others)


def test_a_rare_row_says_what_an_early_one_would() -> None:
    early, rare = columns_of(["early"] * 4), columns_of(["rare"] * 4)

    assert [name for name in RARE if early[name] != rare[name]] == ["lower_lookups", "warmup_bytes"]
    assert any(early["prefetch_wasted_bytes"])


@pytest.mark.parametrize(
    "policy",
    [
        {"prefetch": "previous-token", "eviction": "fifo"},
        {"prefetch": {"kind": "predicted", "cancel": True}},
    ],
)
def test_the_flag_rare_costs_room_and_changes_nothing(policy: dict[str, Any]) -> None:
    """Every plan may be said to be rare: what it has is recorded either way."""

    def run(everything_rare: bool) -> tuple[dict[str, list[int]], list[LayerPlan]]:
        plans: list[LayerPlan] = []
        blocks: list[Columns] = []

        def watch(plan: LayerPlan) -> None:
            plans.append(plan)
            plan.rare |= everything_rare

        setting = Setting(toy_profile(), policy, {"hbm": 200})
        simulate(predicted_trace(), setting, sinks=[blocks.append], on_plan=watch)
        return rows_of(blocks), plans

    found, plans = run(False)
    assert found == run(True)[0]
    assert any(plan.early and not plan.rare for plan in plans)
    assert sum(found["prefetch_issued"]) == sum(len(plan.prefetch) for plan in plans) > 0
    assert sum(found["prefetch_used"]) == sum(plan.prefetch_used for plan in plans)
    assert sum(found["prefetch_wasted_bytes"]) == sum(plan.prefetch_wasted for plan in plans)
