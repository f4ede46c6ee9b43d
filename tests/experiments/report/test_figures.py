"""Tests of the figures that Python lays out: Plotly accepts them, and they say what results say."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetier.experiments.pareto import front
from moetier.experiments.report import curves, timelines
from moetier.experiments.report.breakdown import breakdowns
from moetier.experiments.report.choice import contends, differing, on_front, some, title_of
from moetier.experiments.report.curves import hit_curves, lines_of, share
from moetier.experiments.report.figure import Figure, number, percent
from moetier.experiments.report.folder import Entry, read_folder
from moetier.experiments.report.measured import measured, remarks, summary
from moetier.experiments.report.palette import COLORS, SYMBOLS, label, look
from moetier.experiments.report.timelines import timeline
from moetier.sim.machine.base import Span
from moetier.traces.errors import InputError

MakeEntry = Callable[..., Entry]


def accepted(figure: Figure | None) -> Figure:
    """Return *figure* after Plotly has checked every key and value of it."""
    graph_objects = pytest.importorskip("plotly.graph_objects", reason="needs the extra 'report'")
    assert figure is not None
    graph_objects.Figure(figure.traces, figure.layout)
    json.dumps(figure.spec(), allow_nan=False)
    assert all(len(row) == len(figure.table.head) for row in figure.table.rows)
    return figure


def found(folder: Path) -> dict[str, Any]:
    validation = read_folder(folder).validation
    assert validation is not None
    return validation


def test_breakdowns_add_up_to_the_metric(finished: Path) -> None:
    done = read_folder(finished).done

    time, energy = map(accepted, breakdowns(done, len(done)))

    assert [time.name, energy.name] == ["breakdown-time", "breakdown-energy"]
    for at, entry in enumerate(done):
        total = sum(trace["x"][at] for trace in energy.traces)
        assert total == pytest.approx(entry.metrics["energy_mj_per_token"])
    assert {trace["name"] for trace in time.traces} == {
        "dense part",
        "waiting for copies",
        "experts",
    }
    assert len({trace["marker"]["pattern"]["shape"] for trace in time.traces}) == 3
    assert time.notes == []


def test_a_breakdown_says_what_it_leaves_out_and_names_the_extremes(make_entry: MakeEntry) -> None:
    entries = [
        make_entry("a", "low", **{"time_breakdown_ms.wait": 1.0, "time_breakdown_ms.dense": None}),
        make_entry("b", "high", **{"time_breakdown_ms.wait": 3.0, "time_breakdown_ms.dense": 0.0}),
    ]

    (time,) = map(accepted, breakdowns(entries, 40))

    assert "2 of 40 points" in time.notes[0]
    assert "least 1 for low, most 3 for high" in time.alt
    assert time.table.rows[0] == ["low", "1", "1"]
    assert breakdowns([], 0) == []


def test_hit_curves_hold_the_oracle_and_go_up(finished: Path) -> None:
    figure = accepted(hit_curves(read_folder(finished).done))

    names = [trace["name"] for trace in figure.traces]
    assert names == ["belady (oracle)", "on-demand", "layer-lfu"]
    assert figure.traces[0]["line"]["width"] > figure.traces[1]["line"]["width"]
    assert figure.traces[0]["x"] == pytest.approx([0.25, 0.5], rel=0.01)
    belady, demand = figure.traces[0]["y"], figure.traces[1]["y"]
    assert all(a >= b for a, b in zip(belady, demand, strict=True))
    assert len(figure.table.rows) == 6
    assert figure.notes == []


def test_without_an_oracle_the_figure_says_so(finished: Path) -> None:
    entries = [entry for entry in read_folder(finished).done if entry.policy != "belady"]

    figure = accepted(hit_curves(entries))

    assert figure.notes == ["No oracle: the points hold no arm with `eviction: belady`."]


def test_one_size_is_no_curve(finished: Path, make_entry: MakeEntry) -> None:
    done = read_folder(finished).done

    assert hit_curves([e for e in done if e.axes["capacity.dram"] == "25 %"]) is None
    assert hit_curves([make_entry()]) is None
    assert hit_curves([]) is None
    sizes: list[Any] = [{"capacity_bytes.dram": n, "expert_bytes_total": 10} for n in (1, 2)]
    apart = [make_entry(p, p, hit_rate_decode=0.5, **s) for p, s in zip("ab", sizes, strict=True)]
    assert hit_curves(apart) is None


def test_points_that_differ_in_more_than_the_size_are_other_curves(make_entry: MakeEntry) -> None:
    entries = [
        make_entry(
            axes={"seed": seed, "capacity.dram": f"{size} GB"},
            hit_rate_decode=0.1 * size,
            expert_bytes_total=10,
            **{"capacity_bytes.dram": size},
        )
        for seed in (1, 2)
        for size in (5, 4)
    ]

    lines = lines_of(entries)

    assert lines is not None
    assert list(lines[1]) == ["lru, seed 1", "lru, seed 2"]
    assert [share(entry, "dram") for entry in lines[1]["lru, seed 1"]] == [0.4, 0.5]


def test_curves_beyond_the_limit_are_counted(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "MAX_LINES", 2)

    figure = accepted(hit_curves(read_folder(finished).done))

    assert len(figure.traces) == 2
    assert "2 of 3 curves are drawn." in figure.notes


def test_a_validation_stands_beside_its_diagonal(validated: Path) -> None:
    figure = accepted(measured(found(validated)))

    diagonal, lru, hostile = figure.traces
    assert diagonal["x"] == diagonal["y"]
    assert lru["x"] == [10.0, 5.2]
    assert lru["y"] == [11.0, 6.0]
    assert lru["error_x"]["array"] == pytest.approx([0.5, 0.3])
    assert lru["error_x"]["arrayminus"] == pytest.approx([1.0, 0.2])
    assert "<" not in hostile["name"].replace("<br>", "")
    assert figure.table.rows[0][6] == "10, 9, 10.5"
    assert "3 points of 2 policies" in figure.alt


def test_a_validation_may_lack_times(validated: Path) -> None:
    data = found(validated)
    data["points"][0] |= {"tpot_measured_ms": [None, 0], "first_difference": "row 3"}
    data["points"][1] |= {
        "decision_log_equal": False, "first_difference": "step 2", "error": None,
        "stall_share_measured": [None], "spread": None, "bytes_equal": False,
    }  # fmt: skip

    figure = accepted(measured(data))

    (first, _) = figure.table.rows
    assert first[2:4] == ["step 2", "differ"]
    assert first[7:] == ["-", "-", "-"]
    assert measured({"points": data["points"][:1]}) is None


def test_a_validation_in_words(validated: Path) -> None:
    data = found(validated)

    assert "Median error 10.0%, 90th percentile 15.0%, Kendall's tau none" in summary(data)
    assert remarks(data) == [
        "Beyond what repeats differ by, the median error is 5.0% and the 90th percentile 8.0%.",
        "While it ran, other processes used 25% of the cores.",
        "A simulation with bandwidth doubled misses a tolerance, as it should.",
        "A simulation with contention off would pass too.",
    ]
    assert remarks({}) == []
    assert "tau 0.500; decisions and bytes not all equal" in summary({"kendall_tau": 0.5})


def test_a_timeline_holds_the_first_decoded_tokens(finished: Path) -> None:
    entry = read_folder(finished).done[0]

    figure = accepted(timeline(entry, "on-demand", "timeline-1"))

    (dense,) = [trace for trace in figure.traces if trace["name"] == "dense"]
    config = entry.outcome["config"]
    n_layers = len(dense["x"]) / timelines.TOKENS
    assert n_layers == int(n_layers) > 1
    assert config["synthetic"]["geometry"] == "moe-tiny"
    assert min(dense["base"]) == 0
    assert all(base >= 0 for trace in figure.traces for base in trace["base"])
    assert all(width >= 0 for trace in figure.traces for width in trace["x"])
    assert figure.layout["yaxis"]["ticktext"][0] == "compute"
    assert any(trace["name"] == "demand copy" for trace in figure.traces)


def test_a_timeline_says_the_time_that_metrics_say(finished: Path) -> None:
    entry = read_folder(finished).done[0]
    n = entry.metrics["decode_steps"]

    figure = timeline(entry, "t", "t", tokens=n)

    compute = [
        base + width
        for trace in figure.traces
        for y, base, width in zip(trace["y"], trace["base"], trace["x"], strict=True)
        if y == 0
    ]
    first = timeline(entry, "t", "t", tokens=1)
    ends = [
        base + width
        for trace in first.traces
        for y, base, width in zip(trace["y"], trace["base"], trace["x"], strict=True)
        if y == 0
    ]
    mean = (max(compute) - max(ends)) / (n - 1)  # tpot_ms leaves the first step out
    assert mean == pytest.approx(entry.metrics["tpot_ms"], rel=1e-6)


def test_a_timeline_stops_the_simulation_early(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    collect = timelines._Window.__call__

    def watched(self: Any, span: Span) -> None:
        steps.append(span.info.get("step", 0))
        collect(self, span)

    monkeypatch.setattr(timelines._Window, "__call__", watched)

    timeline(read_folder(finished).done[0], "t", "t", tokens=1)

    assert len({step for step in steps if step}) == 2  # the one shown, and the one that ends it


def test_spans_beyond_the_limit_are_counted(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timelines, "MAX_SPANS", 5)

    figure = accepted(timeline(read_folder(finished).done[0], "t", "t"))

    assert sum(len(trace["x"]) for trace in figure.traces) == 5
    assert "The first 5 of" in figure.notes[0]


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (None, "its config is not known"),
        ({"live": "moe-tiny"}, "it runs a model"),
        ({"trace": "gone.parquet", "hardware": "phone-ufs4"}, "no such file"),
        ({"hardware": "phone-ufs4"}, "expected one routing source"),
        (
            {"synthetic": {"geometry": "moe-tiny", "tokens": 0}, "hardware": "phone-ufs4"},
            "decodes no token|tokens",
        ),
    ],
)
def test_a_point_without_timeline_says_why(
    make_entry: MakeEntry, config: dict[str, Any] | None, problem: str
) -> None:
    with pytest.raises(InputError, match=problem):
        timeline(make_entry(outcome={"config": config}), "t", "t")


def test_copies_that_began_before_the_first_token_are_cut(make_entry: MakeEntry) -> None:
    window = timelines._Window(1, 1)
    early = [Span("link", f"old {n}", n, n + 1) for n in range(5000)]
    for span in [
        *early,
        Span("link", "prefetch L0 E1", 4000, 9000, {"cause": "prefetch"}),
        Span("compute", "dense", 6000, 7000, {"step": 1}),
        Span("resident in dram", "bytes", 7000, 7000, {"bytes": 3}),
    ]:
        window(span)

    assert [span.name for span in window.spans] == ["prefetch L0 E1", "dense"]
    figure = timelines._figure(window.spans, 6000, "t", "t", 1)
    (copy,) = [trace for trace in figure.traces if trace["name"] == "prefetch copy"]
    assert (copy["base"], copy["x"]) == ([0.0], [0.003])


def test_unknown_spans_have_a_part_of_their_own() -> None:
    assert timelines._part(Span("a", "odd", 0, 1)) == "other"
    assert timelines._part(Span("a", "odd", 0, 1, {"cause": "odd"})) == "other"
    assert timelines._part(Span("a", "wait", 0, 1)) == "wait"


def points(make_entry: MakeEntry, values: Sequence[tuple[Any, Any]]) -> list[Entry]:
    return [
        make_entry(str(at), tpot_ms=x, tokens_per_s=y, tokens=1) for at, (x, y) in enumerate(values)
    ]


def test_the_front_is_the_one_of_the_other_figures(make_entry: MakeEntry) -> None:
    values = [(3, 5), (1, 1), (1, 1), (2, 5), (2, 4), (9, 9), (0.5, 0), (9, 9), (10, 9)]

    ours = on_front(points(make_entry, values), "tpot_ms", "tokens_per_s")

    plain = front(values, ["lower", "higher"])
    assert sorted(ours) == [at for at, on in enumerate(plain) if on]
    assert ours == [6, 1, 2, 3, 5, 7]


def test_unknown_values_are_off_the_front(make_entry: MakeEntry) -> None:
    entries = points(make_entry, [(1, None), (None, 9), (2, 1)])

    assert on_front(entries, "tpot_ms", "tokens_per_s") == [2]
    assert on_front(entries, "tpot_ms", "tokens") == []  # tokens have no better direction
    assert on_front([], "tpot_ms", "tokens_per_s") == []


@pytest.mark.parametrize(
    ("n", "first", "most", "expected"),
    [
        (3, [2], 5, [0, 1, 2]),
        (10, [9, 9, 4], 4, [0, 4, 5, 9]),
        (10, [1, 3, 5, 7, 9], 2, [1, 5]),
        (4, [1], 0, []),
        (0, [], 3, []),
    ],
)
def test_some_points_are_chosen_evenly(
    n: int, first: list[int], most: int, expected: list[int]
) -> None:
    assert some(n, first, most) == expected


def test_points_are_titled_by_what_differs(make_entry: MakeEntry) -> None:
    entries = [
        make_entry("a", axes={"capacity.dram": size, "policy.miss": size, "seed": None})
        for size in ("25 %", "50 %")
    ]

    assert differing(entries) == ["capacity.dram"]
    assert (
        title_of(entries[0], ["policy", "hardware", "capacity.dram", "seed"]) == "lru, h, dram 25 %"
    )


def test_series_differ_by_colour_or_marker_and_text_is_escaped() -> None:
    looks = [look(at)[:2] for at in range(len(COLORS) * len(SYMBOLS))]

    assert len(set(looks)) == len(looks)
    assert label("<b>x</b> & y") == "&lt;b&gt;x&lt;/b&gt; &amp; y"
    assert label("one two three four", 8, lines=2) == "one two<br>three…"
    assert label("one two", 8, lines=2) == "one two"
    assert label("") == ""


def test_figures_are_written_for_people() -> None:
    assert [number(v) for v in (None, 0, 0.00012345, 12.3456, 123456.7)] == [
        "-", "0", "0.0001234", "12.35", "123,457",
    ]  # fmt: skip
    assert [percent(v) for v in (None, 0.1234, 0)] == ["-", "12.3%", "0.0%"]


@pytest.mark.parametrize(
    ("policy", "feasible", "may"),
    [
        ({"eviction": "lru", "prefetch": "none"}, None, True),
        ({"eviction": "lru", "prefetch": "none"}, True, True),
        ({"eviction": "lru", "prefetch": "none"}, False, False),
        ({"eviction": "belady"}, None, False),
        ({"eviction": {"hbm": "belady", "dram": "lru"}}, None, False),
        ({"prefetch": {"kind": "oracle", "depth": 2}}, True, False),
        ({"prefetch": {"kind": "previous-token", "depth": 2}}, None, True),
        ({"of another version": "belady", "eviction": "unheard of"}, None, True),
        (None, None, True),
    ],
)
def test_oracles_and_what_breaks_a_limit_are_on_no_front(
    policy: Any, feasible: bool | None, may: bool, make_entry: Callable[..., Entry]
) -> None:
    entry = replace(
        make_entry(tpot_ms=1.0, byte_miss_rate=0.1, feasible=feasible),
        outcome={"config": {"policy": policy}},
    )

    assert contends(entry) is may
    assert on_front([entry], "tpot_ms", "byte_miss_rate") == ([0] if may else [])
