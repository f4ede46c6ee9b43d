"""Tests of putting the channel reader's published figures beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetier.experiments.papers import load_paper
from moetier.experiments.studies import channel_selection as module
from moetier.experiments.studies.channel_selection import (
    BEATEN,
    Ran,
    ran,
    reads_of_questions,
    retained,
    study,
    wins,
)
from moetier.sim.records import SCHEMA, RecordWriter
from moetier.traces.batch import DECODE, PREFILL
from moetier.traces.errors import InputError

PAPER = load_paper("channel-selection")


def made(accuracy: float, nll: float, loops: float | None = None, reads: float = 0.17) -> Ran:
    """Return what a rule did in two tasks, equally well in both."""
    metrics = {
        "accuracy": accuracy,
        "accuracy_se": 0.02,
        "accuracy_by_task": {"add": {"mean": accuracy}, "copy": {"mean": accuracy}},
        "nll": nll,
        "nll_by_task": {"add": {"mean": nll}, "copy": {"mean": nll}},
        "repetition_share": loops,
        "plain": {"accuracy": 0.8, "repetition_share": 0.0},
    }
    return Ran(metrics, reads, 0.01)


def block(batch: int, speed: float) -> dict[str, Any]:
    return {
        "batch": batch, "speedup": speed, "speedup_low": speed - 0.1, "speedup_high": speed + 0.1,
        "rank": 32, "reader_ms": 1.0, "dense_ms": speed, "dense": "torch", "reads": 0.177,
    }  # fmt: skip


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for minutes of running: the threshold is better at 13 % and worse at 17.8 %."""

    def ran(rule: str, reads: str, rank: int = 0, long: int = 0, **_: Any) -> Ran:
        if rule == "threshold":
            return made(0.7, 0.5, 0.75, 0.129)
        if reads == "13 %":
            return made(0.6, 0.6)
        if rank:
            return made(0.72, 0.5, 0.25)
        return made(0.76 if rule == "top-k" else 0.8, 0.4, 0.25)

    monkeypatch.setattr(module, "ran", ran)
    blocks = [block(1, 1.8), block(8, 2.2), block(32, 1.5)]
    monkeypatch.setattr(module, "_measured", lambda: blocks)


@pytest.mark.usefixtures("measured")
def test_every_figure_is_what_was_run() -> None:
    rows = {found.name: found for found in study(PAPER)}

    assert set(rows) == set(PAPER.figures)
    kept = rows["accuracy_retained"]
    assert (kept.ours, kept.low, kept.high) == pytest.approx((0.95, 0.9 - 0.025, 1.025))
    assert rows["comparisons_top_k"].ours == rows["comparisons_top_k"].high == 0.5
    assert BEATEN not in rows["comparisons_top_k"].assumptions
    reads = rows["threshold_reads"]
    assert (reads.ours, reads.low, reads.high) == pytest.approx((0.129, 0.119, 0.139))
    assert reads.ratio == 1
    assert rows["loops_threshold"].ours == 0.75
    assert rows["loop_free_top_k"].ours == 0.75
    assert rows["loop_free_top_k"].high == pytest.approx(0.75 + (0.1875 / 11) ** 0.5)
    assert rows["sketch_size"].ours == pytest.approx(0.0672, abs=1e-4)
    assert rows["block_speed_1"].ours == 1.8
    assert rows["block_speed_larger"].ours == 2.2  # the best of the larger ones
    assert {found.kind for found in rows.values()} == {"prediction"}


@pytest.mark.usefixtures("measured")
def test_without_what_it_takes_a_figure_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise InputError("no numba here")

    monkeypatch.setattr(module, "_measured", missing)
    speeds = [found for found in study(PAPER) if found.name.startswith("block")]
    assert [(found.kind, found.ours, found.reason) for found in speeds] == [
        ("not-testable", None, "no numba here")
    ] * 2

    monkeypatch.setattr(module, "ran", missing)
    rows = study(PAPER)
    assert {found.name for found in rows} == set(PAPER.figures)
    assert [found.name for found in rows if found.kind == "prediction"] == ["sketch_size"]


def test_a_win_is_to_be_at_least_as_good() -> None:
    better, worse, mixed = made(0.9, 0.1), made(0.8, 0.2), made(0.9, 0.3)

    def share(ours: Ran, theirs: Ran) -> float:
        return wins({("top-k", "13 %"): ours, ("threshold", "13 %"): theirs}, "top-k")

    assert share(better, worse) == share(worse, worse) == 1
    assert share(worse, better) == 0
    assert share(mixed, worse) == 0.5


def test_a_threshold_that_wins_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(rule: str, *_: Any, **__: Any) -> Ran:
        return made(0.8, 0.1, 0.5) if rule == "threshold" else made(0.7, 0.2, 0.5)

    monkeypatch.setattr(module, "ran", ran)
    monkeypatch.setattr(module, "_measured", lambda: [block(1, 1.8), block(8, 2.2)])
    (compared,) = [found for found in study(PAPER) if found.name == "comparisons_top_k"]

    assert compared.ours == 0
    assert BEATEN in compared.assumptions


def test_retained_is_beside_the_plain_model() -> None:
    assert retained(made(0.6, 1.0).metrics) == pytest.approx((0.75, 0.025))


def test_reads_are_counted_question_by_question(tmp_path: Path) -> None:
    """Two questions of two layers: two decoded tokens, then one."""
    phase = [PREFILL] * 2 + [DECODE] * 4 + [PREFILL] * 2 + [DECODE] * 2
    columns = {name: np.zeros(len(phase), np.int64) for name in SCHEMA.names}
    columns["phase"] = np.array(phase)
    columns["step"] = np.repeat(np.arange(5), 2)
    columns["lookup_bytes"] += 100
    columns["spared_bytes"] = np.array([9, 9, 80, 70, 60, 50, 9, 9, 90, 70])
    path = tmp_path / "records.parquet"
    with RecordWriter(path) as write:
        write(columns)

    assert reads_of_questions(path) == pytest.approx([0.35, 0.2])


@pytest.mark.slow
def test_moe_tiny_is_really_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="a live model needs the extra 'models'")
    pytest.importorskip("transformers", reason="a live model needs the extra 'models'")
    monkeypatch.setenv("MOETIER_CACHE", str(tmp_path))
    found = ran("top-k", "50 %", items=3)
    rough = ran("threshold", "17.8 %", items=3)

    assert found.reads == pytest.approx(0.4974, abs=1e-4)
    assert found.reads_se == pytest.approx(0, abs=1e-9)  # every token reads the same
    assert found.metrics["accuracy"] == 1
    assert rough.reads < 0.3
    assert rough.reads_se > 0
    assert set(found.metrics["nll_by_task"]) == set(found.metrics["accuracy_by_task"])
    assert len(list(tmp_path.glob("channels-*.safetensors"))) == 1
