"""Tests of the figure of simulated against measured times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from moetier.experiments import validation_figure
from moetier.experiments.canvas import new_figure
from moetier.experiments.validation_figure import draw
from moetier.validate.compare.grid import Point


def point(policy: str, simulated: float, measured: list[float]) -> Point:
    return Point(
        policy=policy, capacity={"dram": "10 %"}, asks_lateness=False, decision_log_equal=True,
        bytes_equal=True, first_difference=None, miss_rate=0.5, bytes_read_total=1,
        tpot_sim_ms=simulated, tpot_measured_ms=measured, stall_share_sim=0.5,
        stall_share_measured=[0.5], stall_sim_ms=1.0, stall_measured_ms=[1.0], attribution_ms=None,
    )  # fmt: skip


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what draws points and gives the axes."""
    seen: list[Any] = []

    def new() -> Any:
        figure, ax = new_figure()
        seen.append(ax)
        return figure, ax

    monkeypatch.setattr(validation_figure, "new_figure", new)

    def make(points: list[Point]) -> Any:
        draw(points, tmp_path / "figure.png", "a title")
        return seen.pop()

    return make


def test_a_policy_is_one_series_of_medians_with_whiskers(drawn: Any) -> None:
    ax = drawn([
        point("a", 11, [10, 9, 14]), point("b", 5, [5]), point("a", 20, [20, 22]),
    ])  # fmt: skip
    series = {box.get_label(): box for box in ax.containers}

    assert list(series) == ["a", "b"]
    line, _, (whiskers,) = series["a"]
    assert line.get_xdata().tolist() == [10, 21]
    assert line.get_ydata().tolist() == [11, 20]
    ends = [segment[:, 0].tolist() for segment in whiskers.get_segments()]
    assert ends == [pytest.approx([9, 14]), pytest.approx([20, 22])]


def test_the_diagonal_spans_all_points_on_equal_scales(drawn: Any) -> None:
    ax = drawn([point("a", 2, [1]), point("b", 50, [80])])
    diagonal = ax.lines[0]

    assert list(diagonal.get_xdata()) == list(diagonal.get_ydata())
    assert diagonal.get_xdata()[0] < 1
    assert diagonal.get_xdata()[1] > 80
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert "measured (ms)" in ax.get_xlabel()
    assert "simulated (ms)" in ax.get_ylabel()


def test_many_policies_are_all_drawn(drawn: Any, tmp_path: Path) -> None:
    ax = drawn([point(f"policy {n}", 1 + n, [1 + n]) for n in range(12)])

    assert len(ax.containers) == 12
    assert len({(c[0].get_color(), c[0].get_marker()) for c in ax.containers}) == 12
    assert (tmp_path / "figure.png").stat().st_size > 0
