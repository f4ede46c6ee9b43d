"""Tests of the timeline: Chrome Trace Event JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from moetier.experiments.config import RunConfig
from moetier.experiments.runs import run
from moetier.experiments.timeline import TimelineWriter
from moetier.sim.machine.base import Span
from moetier.traces.errors import InputError

SPANS = [
    Span("compute", "dense", 0, 1_500, {"step": 0, "layer": 0}),
    Span("link a to b lane 0", "demand L0 E3", 1_500, 2_001, {"cause": "demand", "bytes": 7}),
    Span("link a to b lane 1", "prefetch L1 E3", 1_600, 1_600, {"cause": "prefetch"}),
    Span("cpu", "experts", 2_000, 3_000),
    Span("resident in b", "bytes", 2_001, 2_001, {"bytes": 70}),
]


def write(path: Path, spans: list[Span], **more: Any) -> dict[str, Any]:
    with TimelineWriter(path, "a phone", **more) as writer:
        for span in spans:
            writer(span)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def events(found: dict[str, Any], ph: str) -> list[dict[str, Any]]:
    return [event for event in found["traceEvents"] if event["ph"] == ph]


def test_the_file_is_what_viewers_read(tmp_path: Path) -> None:
    found = write(tmp_path / "t.json", SPANS)

    assert found["displayTimeUnit"] == "ms"
    assert found["otherData"]["times"] == "modelled"
    names = [e["args"]["name"] for e in events(found, "M") if e["name"] == "process_name"]
    assert names == ["a phone"]


def test_times_are_microseconds_and_nanoseconds_survive(tmp_path: Path) -> None:
    found = write(tmp_path / "t.json", SPANS)

    dense, demand, prefetch, cpu = events(found, "X")
    assert (dense["ts"], dense["dur"]) == (0.0, 1.5)
    assert (demand["ts"], demand["dur"]) == (1.5, 0.501)
    assert prefetch["dur"] == 0
    assert (cpu["ts"], cpu["dur"]) == (2.0, 1.0)


def test_lanes_are_named_and_sorted(tmp_path: Path) -> None:
    found = write(tmp_path / "t.json", SPANS)

    meta = events(found, "M")
    names = {e["tid"]: e["args"]["name"] for e in meta if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in meta if e["name"] == "thread_sort_index"}
    by_order = [names[tid] for tid in sorted(order, key=order.__getitem__)]
    assert by_order == ["compute", "cpu", "link a to b lane 0", "link a to b lane 1"]
    assert {e["tid"] for e in events(found, "X")} == set(names)


def test_copies_say_why(tmp_path: Path) -> None:
    found = write(tmp_path / "t.json", SPANS)

    categories = [event["cat"] for event in events(found, "X")]
    assert categories == ["compute,dense", "copy,demand", "copy,prefetch", "compute,experts"]


def test_what_is_resident_is_a_counter(tmp_path: Path) -> None:
    found = write(tmp_path / "t.json", SPANS)

    (counter,) = events(found, "C")
    assert counter["name"] == "resident in b"
    assert counter["args"] == {"bytes": 70}
    assert counter["ts"] == 2.001


def test_an_empty_run_is_still_a_file(tmp_path: Path) -> None:
    assert len(write(tmp_path / "t.json", [])["traceEvents"]) == 1


def test_too_many_events_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"t\.json: more than 3 events.*shorten the run"):
        write(tmp_path / "t.json", SPANS, max_events=3)

    assert list(tmp_path.iterdir()) == []


def test_the_file_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with TimelineWriter(path, "x") as writer:
        writer(SPANS[0])
        assert not path.exists()

    assert path.exists()


def test_a_run_fills_its_lanes(tmp_path: Path, make_run: Callable[..., RunConfig]) -> None:
    path = tmp_path / "t.json"
    result = run(make_run(), timeline=path)

    found = json.loads(path.read_text())
    compute = [e for e in events(found, "X") if e["cat"].startswith("compute")]
    spent = sum(Fraction(str(e["dur"])) for e in compute) / 1000
    copied = sum(e["args"]["bytes"] for e in events(found, "X") if e["cat"] == "copy,demand")
    assert float(spent) == pytest.approx(result["elapsed_ms"], rel=1e-9)
    assert copied == result["demand_bytes"]
    assert events(found, "C")[-1]["args"]["bytes"] <= result["peak_bytes"]


def test_one_lane_does_one_thing_at_a_time(
    tmp_path: Path, make_run: Callable[..., RunConfig]
) -> None:
    path = tmp_path / "t.json"
    run(make_run(policy="previous-token"), timeline=path)

    lanes: dict[int, list[tuple[float, float]]] = {}
    for event in events(json.loads(path.read_text()), "X"):
        lanes.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(lanes) > 2
    for spans in lanes.values():
        spans.sort()
        for (_, end), (start, _) in pairwise(spans):
            assert start >= end - 1e-6


def test_watching_changes_nothing(tmp_path: Path, make_run: Callable[..., RunConfig]) -> None:
    plain = run(make_run(policy="previous-token"))

    assert run(make_run(policy="previous-token"), timeline=tmp_path / "t.json") == plain
