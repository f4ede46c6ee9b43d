"""Tests of the figures: what is drawn, and the tables beside."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from moetier.experiments import plots as module
from moetier.experiments.canvas import COLORS, new_figure, palette, place_legend, save
from moetier.experiments.plots import draw_all
from moetier.experiments.sweep import PlotConfig
from moetier.traces.errors import InputError

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def table() -> pd.DataFrame:
    return pd.DataFrame({
        "policy": ["lru", "lru", "lfu", "lfu", "lfu"],
        "capacity.dram": ["50 %", "25 %", "50 %", "25 %", "75 %"],
        "status": ["done"] * 4 + ["failed"],
        "miss_rate": [0.2, 0.4, 0.1, 0.3, None],
        "tpot_ms": [3.0, 2.0, 2.5, 4.0, None],
        "hit_rate_decode": [0.8, 0.6, 0.9, 0.7, None],
        "tokens": [5, 5, 5, 5, None],
        "accuracy": [None] * 5,
        "time_breakdown_ms.dense": [1.0, 1.0, 1.0, 1.0, None],
        "time_breakdown_ms.wait": [2.0, 1.0, 1.5, 3.0, None],
        "energy_breakdown.links": [0.0, 0.0, 0.0, 0.0, None],
        "energy_breakdown.static": [2.0, 1.0, 1.5, 3.0, None],
        "key": list("abcde"),
    })  # fmt: skip


class Axes:
    """The axes of the last figure that was saved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Watch what is saved."""
        self.figure: Any = None

        def keep(figure: Any, path: Path) -> None:
            self.figure = figure
            save(figure, path)

        monkeypatch.setattr(module, "save", keep)
        monkeypatch.setattr("moetier.experiments.bars.save", keep)

    def __getattr__(self, name: str) -> Any:
        """Ask the first axes."""
        return getattr(self.figure.axes[0], name)

    def legend_texts(self) -> list[str]:
        """Return the entries of the legend of the first axes."""
        return [text.get_text() for text in self.figure.axes[0].get_legend().get_texts()]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Axes:
    return Axes(monkeypatch)


def draw(table: pd.DataFrame, folder: Path, **plot: Any) -> pd.DataFrame:
    (path,) = draw_all(table, [PlotConfig(**plot)], folder, "title")
    assert path.read_bytes().startswith(PNG)
    found: pd.DataFrame = pd.read_csv(path.with_suffix(".csv"))
    return found


def test_a_pareto_table_says_who_is_on_the_front(
    table: pd.DataFrame, tmp_path: Path, drawn: Axes
) -> None:
    found = draw(table, tmp_path, kind="pareto", x="miss_rate", y="tpot_ms", hue="policy")

    assert found.columns.tolist() == ["policy", "miss_rate", "tpot_ms", "key", "on_front"]
    assert found["on_front"].tolist() == [False, True, True, False]
    assert found["key"].tolist() == ["a", "b", "c", "d"]


def test_a_pareto_figure_names_policies_and_directions(
    table: pd.DataFrame, tmp_path: Path, drawn: Axes
) -> None:
    draw(table, tmp_path, kind="pareto", x="miss_rate", y="hit_rate_decode", hue="policy")

    assert drawn.get_xlabel() == "miss rate (share)\n← lower is better"
    assert drawn.get_ylabel() == "hit rate, decode (share)\nhigher is better →"
    assert drawn.legend_texts() == ["lru", "lfu", "dominated"]
    assert drawn.get_title() == "title: hit rate, decode against miss rate"


def test_dominated_points_are_faint_and_the_front_is_joined(
    table: pd.DataFrame, tmp_path: Path, drawn: Axes
) -> None:
    draw(table, tmp_path, kind="pareto", x="miss_rate", y="tpot_ms", hue="policy")

    alphas = {c.get_alpha() for c in drawn.collections if len(c.get_offsets())}
    line = drawn.lines[0]
    assert alphas == {None, 0.4}
    assert list(zip(line.get_xdata(), line.get_ydata(), strict=True)) == [(0.1, 2.5), (0.4, 2.0)]
    assert drawn.legend_texts()[0] == "front of all"


@pytest.mark.parametrize("kind", ["pareto", "line"])
def test_what_may_be_off_has_whiskers(
    kind: str, table: pd.DataFrame, tmp_path: Path, drawn: Axes
) -> None:
    known = table.assign(
        accuracy=[0.9, 0.8, 0.7, 0.6, None], accuracy_se=[0.1, 0.2, 0.1, 0.1, None]
    )
    draw(known, tmp_path, kind=kind, x="miss_rate", y="accuracy", hue="policy")

    (lru, lfu) = drawn.containers
    ends = [segment[:, 1].tolist() for segment in lru.lines[2][0].get_segments()]
    low, high = zip(*sorted(ends), strict=True)
    assert low == pytest.approx((0.6, 0.8))
    assert high == pytest.approx((1.0, 1.0))
    assert len(lfu.lines[2][0].get_segments()) == 2


def test_points_of_the_front_say_their_capacity(
    table: pd.DataFrame, tmp_path: Path, drawn: Axes
) -> None:
    draw(table, tmp_path, kind="pareto", x="miss_rate", y="tpot_ms", hue="policy")

    assert sorted(text.get_text() for text in drawn.texts) == ["dram 25 %", "dram 50 %"]


def test_a_pareto_axis_can_be_a_capacity(table: pd.DataFrame, tmp_path: Path, drawn: Axes) -> None:
    found = draw(table, tmp_path, kind="pareto", x="capacity.dram", y="tpot_ms", hue="policy")

    assert found["on_front"].tolist() == [False, True, False, False]
    assert drawn.get_xlabel().startswith("expert cache in dram (% of all expert bytes)")


def test_without_a_hue_there_is_one_group(table: pd.DataFrame, tmp_path: Path, drawn: Axes) -> None:
    found = draw(table, tmp_path, kind="pareto", x="miss_rate", y="tpot_ms")

    assert found["policy"].tolist() == ["lru", "lru", "lfu", "lfu"]
    assert drawn.legend_texts() == ["front of all", "dominated"]


def test_lines_go_by_x(table: pd.DataFrame, tmp_path: Path, drawn: Axes) -> None:
    found = draw(table, tmp_path, kind="line", x="capacity.dram", y="tpot_ms", hue="policy")

    assert [list(line.get_xdata()) for line in drawn.lines] == [[25.0, 50.0], [25.0, 50.0]]
    assert list(drawn.lines[0].get_ydata()) == [2.0, 3.0]
    assert found["capacity.dram"].tolist() == ["25 %", "25 %", "50 %", "50 %"]
    assert drawn.legend_texts() == ["lru", "lfu"]


def test_a_scatter_has_no_lines(table: pd.DataFrame, tmp_path: Path, drawn: Axes) -> None:
    draw(table, tmp_path, kind="scatter", x="policy", y="tokens")

    assert drawn.lines[0].get_linewidth() == 0
    assert [tick.get_text() for tick in drawn.get_xticklabels()] == ["lru", "lfu"]
    assert drawn.get_legend() is None


def test_bars_stack_up_to_the_whole(table: pd.DataFrame, tmp_path: Path, drawn: Axes) -> None:
    found = draw(table, tmp_path, kind="breakdown", y="time")

    parts = found[["time_breakdown_ms.dense", "time_breakdown_ms.wait"]]
    assert parts.sum(axis=1).tolist() == [3.0, 2.0, 2.5, 4.0]
    assert found["label"].tolist()[:2] == ["lru, dram 50 %", "lru, dram 25 %"]
    ends = [bar.get_x() + bar.get_width() for bar in drawn.containers[1]]
    assert ends == [3.0, 2.0, 2.5, 4.0]
    assert drawn.legend_texts() == ["dense part", "waiting for copies"]


def test_time_and_energy_stand_side_by_side(
    table: pd.DataFrame, tmp_path: Path, drawn: Axes
) -> None:
    draw(table, tmp_path, kind="breakdown")

    labels = [ax.get_xlabel() for ax in drawn.figure.axes]
    energy = [text.get_text() for text in drawn.figure.axes[1].get_legend().get_texts()]
    assert labels[0].startswith("time per output token (ms)")
    assert labels[1].startswith("energy per token (mJ)")
    assert energy == ["static power"]  # what is zero everywhere is not in the legend


def test_bars_can_be_labelled_by_a_column(table: pd.DataFrame, tmp_path: Path, drawn: Axes) -> None:
    found = draw(table, tmp_path, kind="breakdown", x="capacity.dram")

    assert found["label"].tolist() == ["dram 50 %", "dram 25 %", "dram 50 %", "dram 25 %"]


def test_later_figures_of_a_kind_are_numbered(table: pd.DataFrame, tmp_path: Path) -> None:
    pareto = PlotConfig(kind="pareto", x="miss_rate", y="tpot_ms")
    line = PlotConfig(kind="line", x="capacity.dram", y="tpot_ms")

    made = draw_all(table, [pareto, line, pareto, pareto], tmp_path, "t")

    assert [p.name for p in made] == ["pareto.png", "line.png", "pareto-2.png", "pareto-3.png"]
    assert all(path.with_suffix(".csv").is_file() for path in made)


def test_equal_results_give_equal_figures(table: pd.DataFrame, tmp_path: Path) -> None:
    plot = PlotConfig(kind="pareto", x="miss_rate", y="tpot_ms", hue="policy")
    (path,) = draw_all(table, [plot], tmp_path, "t")
    first = path.read_bytes()

    draw_all(table, [plot], tmp_path, "t")

    assert path.read_bytes() == first


@pytest.mark.parametrize(
    ("plot", "problem"),
    [
        ({"kind": "pareto", "x": "tokens", "y": "tpot_ms"}, "plots.0: x: 'tokens' has no better"),
        ({"kind": "pareto", "x": "tpot_ms", "y": "policy"}, "y: 'policy' has no better direction"),
        ({"kind": "pareto", "x": "tpot_ms", "y": "accuracy"}, "y: 'accuracy' is null in every row"),
        ({"kind": "line", "x": "tpot_ms"}, "y: this key is missing"),
        ({"kind": "line", "x": "nope", "y": "tpot_ms"}, "x: no column 'nope'"),
        ({"kind": "line", "x": "tpot_ms", "y": "tokens", "hue": "no"}, "hue: no column 'no'"),
        ({"kind": "breakdown", "y": "bytes"}, "y: 'bytes' has no breakdown; use time or energy"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    plot: dict[str, Any], problem: str, table: pd.DataFrame, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        draw_all(table, [PlotConfig(**plot)], tmp_path, "t")

    assert problem in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(InputError, match=r"needs? matplotlib.*pip install moetier\[plots\]"):
        new_figure()


def test_many_groups_can_be_told_apart() -> None:
    pairs = [pair for pair, _ in zip(palette(), range(32), strict=False)]

    assert len(set(pairs)) == 32
    assert len({color for color, _ in pairs[: len(COLORS)]}) == len(COLORS)


def test_no_labels_no_legend() -> None:
    _, ax = new_figure()

    place_legend(ax, "policy")

    assert ax.get_legend() is None
