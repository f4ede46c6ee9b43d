"""Tests of what the page's scripts read: columns, axes, and YAML that runs again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from moetier.experiments.config import load_run
from moetier.experiments.report import columns, payload
from moetier.experiments.report.columns import about, default_axes, metric_names, numeric
from moetier.experiments.report.folder import Entry, Folder, read_folder
from moetier.experiments.report.payload import hues, pack, short, yaml_blocks
from moetier.experiments.runs import run

MakeEntry = Callable[..., Entry]


def folder_of(*entries: Entry, **more: Any) -> Folder:
    return Folder(Path("x"), "sweep", "x", datetime(2026, 1, 1, tzinfo=UTC), list(entries), **more)


def value_at(column: dict[str, Any], i: int) -> Any:
    """Read a column as the page's script does."""
    if "values" in column:
        return column["values"][i]
    return column["texts"][column["at"][i]] if "texts" in column else column["same"]


def yaml_at(data: dict[str, Any], i: int) -> str:
    return "".join(data["yaml_texts"][at] for at in data["yaml"][i])


def test_every_value_of_every_point_comes_back(finished: Path) -> None:
    folder = read_folder(finished)

    data = pack(folder)

    assert data["n"] == 6
    for i, entry in enumerate(folder.entries):
        assert data["keys"][i] == entry.key
        for column in data["metrics"]:
            assert value_at(column, i) == short(entry.metrics[column["name"]])
        for column in data["axes"]:
            assert value_at(column, i) == entry.axes[column["name"]]


def test_the_yaml_of_a_point_runs_again_and_gives_the_same(finished: Path, tmp_path: Path) -> None:
    folder = read_folder(finished)
    data = pack(folder)
    file = tmp_path / "point.yaml"

    for i, entry in enumerate(folder.entries):
        file.write_text(yaml_at(data, i))

        again = run(load_run(file))["provenance"]["records"]

        assert again == entry.outcome["provenance"]["records"]


def test_the_policy_keeps_its_name_in_the_yaml(finished: Path) -> None:
    data = pack(read_folder(finished))

    assert "  name: layer-lfu\n" in yaml_at(data, 2)
    assert "\npopularity:" not in yaml_at(data, 2)  # null, as without it


def test_equal_texts_are_stored_once(finished: Path) -> None:
    data = pack(read_folder(finished))

    assert len(data["yaml_texts"]) == len(set(data["yaml_texts"]))
    assert sum(text.startswith("hardware:") for text in data["yaml_texts"]) == 1
    assert sum(text.startswith("policy:") for text in data["yaml_texts"]) == 3


def test_columns_take_the_smallest_form(finished: Path) -> None:
    data = pack(read_folder(finished))
    forms = {column["name"]: set(column) for column in [*data["axes"], *data["metrics"]]}

    assert "same" in forms["hardware"]
    assert {"texts", "at"} <= forms["policy"]
    assert "values" in forms["tpot_ms"]


def test_missing_values_are_null_and_never_nought(make_entry: MakeEntry) -> None:
    folder = folder_of(make_entry("a", tpot_ms=1.0, accuracy=None), make_entry("b", tpot_ms=None))

    data = pack(folder)

    (column,) = data["metrics"]  # of accuracy nothing is known
    assert column["name"] == "tpot_ms"
    assert column["values"] == [1.0, None]
    json.dumps(data, allow_nan=False)


def test_a_folder_without_points_packs(make_entry: MakeEntry) -> None:
    data = pack(folder_of())

    assert (data["n"], data["x"], data["y"]) == (0, None, None)
    assert pack(folder_of(make_entry(status="failed")))["x"] is None


def test_a_point_without_config_has_no_yaml(make_entry: MakeEntry) -> None:
    assert yaml_blocks(make_entry()) == []
    assert yaml_blocks(make_entry(outcome={"config": "broken"})) == []


def test_a_live_model_is_evaluated_again(make_entry: MakeEntry) -> None:
    live = make_entry("a", outcome={"config": {"live": "moe-tiny"}})

    data = pack(folder_of(live, make_entry("b", outcome={"config": {"trace": "t"}})))

    assert [value_at(data["verbs"], i) for i in (0, 1)] == ["evaluate", "simulate"]


def test_file_names_are_safe_in_a_shell() -> None:
    folder = folder_of()

    assert payload._file(replace(folder, name="a b;$(c)/ä")) == "a-b---c"
    assert payload._file(replace(folder, name="../..")) == "point"


def test_figures_have_eight_digits_and_integers_all() -> None:
    assert short(1.23456789012) == 1.2345679
    assert short(12345678901234) == 12345678901234
    assert short(True) is True


def test_points_are_coloured_by_what_differs_and_can_be_told_apart(make_entry: MakeEntry) -> None:
    entries = [make_entry(str(n), f"p{n}", axes={"seed": n % 3}) for n in range(20)]

    assert hues(["policy", "hardware", "seed"], entries) == ["seed"]
    assert hues(["policy", "hardware", "seed"], entries[:14]) == ["policy", "seed"]


def test_the_recommended_point_is_found_by_its_config(make_entry: MakeEntry) -> None:
    config = {
        "hardware": "h", "capacity": {"dram": "5 %"}, "overlap": False, "seed": 0,
        "weights": "bf16", "policy": {"eviction": "lru"},
    }  # fmt: skip
    other = config | {"policy": {"eviction": "lfu"}}
    entries = [
        make_entry("a", on_front=True, outcome={"config": other}),
        make_entry("b", on_front=False, outcome={"config": config}),
        make_entry("c", on_front=True, outcome={"config": config}),
    ]
    text = json.dumps(config | {"policy": {"name": "best", "eviction": "lru"}})
    without_weights = json.dumps({k: v for k, v in json.loads(text).items() if k != "weights"})

    assert pack(folder_of(*entries, recommended=text))["recommended"] == 2
    assert pack(folder_of(*entries, recommended=without_weights))["recommended"] == 2
    assert pack(folder_of(*entries[:2], recommended=text))["recommended"] is None
    assert pack(folder_of(*entries, recommended="- no run"))["recommended"] is None
    assert pack(folder_of(*entries, recommended="a: ["))["recommended"] is None
    assert pack(folder_of(*entries))["recommended"] is None


def test_what_columns_mean() -> None:
    assert about("tpot_ms").title == "time per output token (ms)"
    assert about("capacity_bytes.dram").title == "expert cache in dram (GiB)"
    assert about("capacity_bytes.dram").better == "lower"
    assert about("time_breakdown_ms.wait").title == "time, waiting for copies (ms)"
    assert about("energy_breakdown.odd").title == "energy, odd (mJ)"
    assert about("something_new").better is None


def test_only_numbers_make_axes() -> None:
    first: dict[str, Any] = {"a": 1, "b": True, "c": "x", "d": None, "e": 1.0}
    rows: list[dict[str, Any]] = [first, {"a": None, "e": 2}]

    assert numeric(["a", "b", "c", "d", "e", "f"], rows) == ["a", "e"]


@pytest.mark.parametrize(
    ("axes", "config", "expected"),
    [
        (["tpot_ms", "byte_miss_rate", "accuracy"], {}, ("byte_miss_rate", "accuracy")),
        (["tpot_ms", "energy_mj_per_token"], {}, ("tpot_ms", "energy_mj_per_token")),
        (["tpot_ms", "miss_rate"], {}, ("tpot_ms", "miss_rate")),
        (["odd", "tokens"], {}, ("odd", "tokens")),
        (["odd"], {}, ("odd", "odd")),
        (
            ["tpot_ms", "ttft_ms", "energy_mj_per_token"],
            {
                "plots": [
                    {"kind": "line", "x": "a", "y": "b"},
                    {"kind": "pareto", "x": "ttft_ms", "y": "tpot_ms"},
                ]
            },
            ("ttft_ms", "tpot_ms"),
        ),
        (
            ["tpot_ms", "accuracy", "byte_miss_rate", "capacity_bytes.dram"],
            {"objectives": {"tpot_ms": "minimise", "capacity.dram": "minimise"}},
            ("tpot_ms", "capacity_bytes.dram"),
        ),
        (["tpot_ms", "miss_rate"], {"objectives": ["tpot_ms"]}, ("tpot_ms", "miss_rate")),
    ],
)  # fmt: skip
def test_the_first_axes(axes: list[str], config: Any, expected: tuple[str, str]) -> None:
    assert default_axes(folder_of(config=config), axes) == expected


def test_with_many_points_only_the_known_columns_stay(
    make_entry: MakeEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(make_entry(odd=1, tpot_ms=1.0, **{"energy_breakdown.links": 1.0}))

    assert metric_names(folder) == (["tpot_ms", "odd", "energy_breakdown.links"], [])

    monkeypatch.setattr(columns, "MAX_FULL", 0)

    assert metric_names(folder) == (["tpot_ms", "energy_breakdown.links"], ["odd"])
    assert pack(folder)["left_out"] == ["odd"]
