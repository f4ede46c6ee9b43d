"""Records: the columns, blocks, and the file that appears only when it is complete."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from moetier.sim.energy import COMPONENTS
from moetier.sim.machine.simulated import SimMachine
from moetier.sim.memory import extent_of
from moetier.sim.planner import Planner
from moetier.sim.records import SCHEMA, Columns, Recorder, RecordWriter, read_records
from moetier.sim.run import Setting, drive, set_up, simulate
from moetier.sim.testing import toy_header, toy_profile, toy_trace

TRACE = toy_trace(
    toy_header(layers=2, n_experts=4), [[[0], [1]], [[2], [1]], [[0], [3]]], prefill=[[[0], [0]]]
)
SETTING = Setting(toy_profile(), "previous-token", {"hbm": 120})


def rows_of(blocks: list[Columns]) -> dict[str, list[int]]:
    return {name: np.concatenate([b[name] for b in blocks]).tolist() for name in blocks[0]}


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
