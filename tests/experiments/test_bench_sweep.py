"""Tests of measuring sweeps; how fast they are guards `moetier bench --long`."""

from __future__ import annotations

import pytest

from moetier.experiments import bench as rows
from moetier.experiments.bench_sweep import large, overhead, small, small_sweep, two_processes
from moetier.experiments.sweep import SweepConfig, points_of


@pytest.mark.parametrize("made", [small(7), large(7, 2)])
def test_every_point_is_another_run(made: SweepConfig) -> None:
    assert len({point.key for point in points_of(made, "here")}) == 7


@pytest.mark.slow
def test_the_overhead_is_that_of_a_process_of_its_own() -> None:
    found = overhead(20)

    assert found["ms_per_point"] == pytest.approx(found["seconds"] / 20 * 1e3)
    assert 0 < found["seconds"] < 60
    assert found["growth_mb"] < 50


def test_a_point_that_fails_stops_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = small(2).model_copy(update={"base": small(2).base | {"capacity": {"hbm": "1 B"}}})
    monkeypatch.setattr("moetier.experiments.bench_sweep.small", lambda points: broken)

    with pytest.raises(RuntimeError, match="capacity"):
        small_sweep(2)


@pytest.mark.slow
def test_one_and_two_processes_take_turns() -> None:
    two, one = two_processes(2, points=3, tokens=2)

    assert len(two) == len(one) == 2
    assert min(*two, *one) > 0


@pytest.mark.slow
def test_the_rows_say_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "two_processes", lambda repeats: ([2.0] * repeats, [3.0] * repeats))

    assert rows._sweep_two(3)["ratio"] == 1.5
    found = rows._sweep_overhead(points=12)
    assert found["rate"] == pytest.approx(1e3 / found["ms_per_point"])
    assert "12 points" in found["note"]
