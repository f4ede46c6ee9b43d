"""Tests of estimating how long a sweep takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moetier.experiments import estimate as module
from moetier.experiments.estimate import Head, estimate_s
from moetier.experiments.points import expand_points
from moetier.experiments.sources import open_source
from moetier.traces.geometry import load_geometry
from moetier.traces.io import ArrayTrace
from moetier.traces.synthetic import Synthetic

TINY = load_geometry("moe-tiny")


@pytest.mark.parametrize("steps", [1, 2, 5, 9])
@pytest.mark.parametrize("held", [True, False])
def test_a_head_is_the_beginning(steps: int, held: bool) -> None:
    made = Synthetic(TINY, prompt=3, tokens=8)
    source = ArrayTrace.of(made) if held else made

    head = list(Head(source, steps).batches())

    assert len(head) == 8 * steps
    assert [b.experts for b in head] == [b.experts for b in list(source.batches())[: 8 * steps]]


def test_a_head_ends_at_a_chunk() -> None:
    rows = next(iter(Synthetic(TINY, tokens=6).columns()))
    chunks = [rows.take(rows.step < 3), rows.take(rows.step >= 3)]

    head = Head(ArrayTrace(Synthetic(TINY).header, chunks), 3)

    assert np.concatenate([c.step for c in head.columns()]).max() == 2
    assert len(list(head.columns())) == 1


def test_more_points_and_steps_take_longer(
    run_keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_seconds", lambda point, source, steps: 0.25 + 0.01 * steps)
    few = expand_points(run_keys, {"seed": [1, 2]}, {}, "s")
    many = expand_points(run_keys, {"seed": [1, 2, 3, 4]}, {}, "s")
    fixed, per_step = 0.26, (0.25 + 0.01 * 13 - 0.26) / 13

    assert estimate_s(few, 1) == pytest.approx(2 * (fixed + 13 * per_step))
    assert estimate_s(many, 1) == pytest.approx(4 * (fixed + 13 * per_step))
    assert estimate_s(many, 2) == pytest.approx(2 * (fixed + 13 * per_step) + module.PROCESS_S)
    assert estimate_s(few, 64) == pytest.approx(fixed + 13 * per_step + module.PROCESS_S)


def test_it_grows_the_head_until_it_has_measured_enough(
    run_keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def seconds(point: Any, source: Any, steps: int) -> float:
        tried.append(steps)
        return 0.02 * steps

    monkeypatch.setattr(module, "_seconds", seconds)
    run_keys["synthetic"]["tokens"] = 500
    (point,) = expand_points(run_keys, {}, {}, "s")

    assert estimate_s([point], 1) == pytest.approx(0.02 + (64 * 0.02 - 0.02) / 64 * 501)
    assert tried == [1, 16, 64] * 2


def test_a_real_estimate_is_above_zero(run_keys: dict[str, Any]) -> None:
    points = expand_points(run_keys, {"policy": ["on-demand", "belady"]}, {}, "s")

    seconds = estimate_s(points, -1)

    assert seconds is not None
    assert 0 < seconds < 60


def test_points_that_fail_give_no_estimate(run_keys: dict[str, Any]) -> None:
    run_keys["capacity"] = {"dram": "1 KiB"}
    points = expand_points(run_keys, {}, {}, "s")

    assert estimate_s(points, 1) is None


def test_the_source_is_left_as_it_was(run_keys: dict[str, Any]) -> None:
    (point,) = expand_points(run_keys, {}, {}, "s")
    source = open_source(point.config).source
    before = [rows.experts.copy() for rows in source.columns()]

    estimate_s([point], 1)

    after = [rows.experts for rows in source.columns()]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
