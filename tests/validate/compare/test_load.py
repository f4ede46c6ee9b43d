"""Tests of how busy a machine was, on counters that are written by hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moetier.validate.compare import load
from moetier.validate.compare.load import watch_load

SECOND = os.sysconf("SC_CLK_TCK")


def counters(path: Path, busy: float, idle: float) -> None:
    """Write what all cores did, in seconds; half of what is idle waits for a disk."""
    ticks = [busy * SECOND / 2, 0, busy * SECOND / 2, idle * SECOND / 2, idle * SECOND / 2]
    columns = " ".join(str(round(n)) for n in [*ticks, 0, 0, 0, 77777, 0])
    path.write_text(f"cpu  {columns}\ncpu0 1 2 3 4\nintr 5\n", encoding="ascii")


@pytest.fixture
def stat(tmp_path: Path) -> Path:
    path = tmp_path / "stat"
    counters(path, 100, 1000)
    return path


def test_what_others_computed_is_a_share_of_all_cores(
    stat: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = iter([2.0, 5.0])
    monkeypatch.setattr(load, "_own", lambda: next(own))
    with watch_load(stat) as found:
        counters(stat, 107, 1013)  # 7 of 20 seconds, 3 of them ours

    assert found.others_share == pytest.approx(4 / 20)


def test_what_this_process_computes_is_not_others_load(
    stat: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = iter([2.0, 9.5])
    monkeypatch.setattr(load, "_own", lambda: next(own))
    with watch_load(stat) as found:
        counters(stat, 107, 1013)

    assert found.others_share == 0  # clocks differ a little, a share is never below zero


@pytest.mark.parametrize("text", ["", "cpu 1 2 3", "cpux 1 2 3 4 5 6 7 8"])
def test_without_counters_it_is_unknown(tmp_path: Path, text: str) -> None:
    stat = tmp_path / "stat"
    stat.write_text(text or "nothing", encoding="ascii")
    with watch_load(stat) as strange, watch_load(tmp_path / "none") as absent:
        pass

    assert strange.others_share is None
    assert absent.others_share is None


def test_load_averages_are_of_the_beginning_and_the_end(
    stat: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([(0.5, 0, 0), (1.5, 0, 0)])
    monkeypatch.setattr(os, "getloadavg", lambda: next(now))
    with watch_load(stat) as found:
        assert found.load_average_after is None

    assert found.as_dict() == {
        "cores": os.cpu_count(),
        "load_average_before": 0.5,
        "load_average_after": 1.5,
        "others_share": None,  # the counters stood still
    }


def test_systems_without_load_averages_say_nothing(
    stat: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> tuple[float, float, float]:
        raise OSError

    monkeypatch.setattr(os, "getloadavg", none)
    with watch_load(stat) as found:
        pass

    assert (found.load_average_before, found.load_average_after) == (None, None)
