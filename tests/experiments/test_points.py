"""Tests of turning a sweep into points."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moetier
from moetier.experiments.config import RunConfig, check_run
from moetier.experiments.points import axes, check_axes, expand_points, key_of, spell
from moetier.traces.errors import InputError
from moetier.traces.geometry import load_geometry
from moetier.traces.io import write_trace
from moetier.traces.synthetic import Synthetic


def test_a_grid_gives_all_combinations_in_order(run_keys: dict[str, Any]) -> None:
    grid = {"policy": ["on-demand", "belady"], "capacity.dram": ["25 %", "50 %"]}

    points = expand_points(run_keys, grid, {}, "s")

    assert [point.label for point in points] == [
        "policy=on-demand, capacity.dram=25 %",
        "policy=on-demand, capacity.dram=50 %",
        "policy=belady, capacity.dram=25 %",
        "policy=belady, capacity.dram=50 %",
    ]


def test_zip_moves_in_step(run_keys: dict[str, Any]) -> None:
    together = {"seed": [1, 2], "synthetic.seed": [10, 20]}

    points = expand_points(run_keys, {"policy": ["on-demand", "belady"]}, together, "s")

    assert [(p.config.seed, p.config.synthetic and p.config.synthetic.seed) for p in points] == [
        (1, 10),
        (1, 10),
        (2, 20),
        (2, 20),
    ]


def test_nothing_swept_is_one_point(run_keys: dict[str, Any]) -> None:
    (point,) = expand_points(run_keys, {}, {}, "s")

    assert point.values == {}
    assert point.label == "the only point"


def test_points_do_not_share_what_they_change(run_keys: dict[str, Any]) -> None:
    policies = [{"eviction": "lfu"}, {"eviction": "belady"}]

    first, second = expand_points(run_keys, {"policy": policies}, {}, "s")

    assert first.config.policy == {"eviction": "lfu"}
    assert second.config.policy == {"eviction": "belady"}
    assert "policy" not in run_keys


def test_a_part_of_a_policy_can_be_swept(run_keys: dict[str, Any]) -> None:
    points = expand_points(
        {**run_keys, "policy": "on-demand"}, {"policy.eviction": ["lru", "lfu"]}, {}, "s"
    )

    assert points[1].config.policy == {"preset": "on-demand", "eviction": "lfu"}
    assert axes(points[1])["policy"] == "on-demand eviction=lfu"


@pytest.mark.parametrize(
    ("key", "values", "problem"),
    [
        ("polcy", ["x"], "s, point polcy=x: polcy: unknown key; did you mean 'policy'?"),
        ("capacity.dram", [0.25], "s, point capacity.dram=0.25: capacity.dram: expected a size"),
        ("capacity.dram.x", ["1 %"], "'capacity.dram.x' leads into 'capacity.dram'"),
        ("policy", ["nope"], "s, point policy=nope: policy: unknown policy 'nope'"),
        ("hardware", ["nope"], "s, point hardware=nope: hardware: unknown hardware 'nope'"),
    ],
)
def test_a_bad_point_is_named(
    key: str, values: list[Any], problem: str, run_keys: dict[str, Any]
) -> None:
    with pytest.raises(InputError) as caught:
        expand_points(run_keys, {key: values}, {}, "s")

    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("grid", "together", "problem"),
    [
        ({"seed": 3}, {}, "sweep.seed: expected a list of values, got 3; a single value belongs"),
        ({"seed": []}, {}, "sweep.seed: expected a list of values, got []"),
        ({}, {"seed": "ab"}, "zip.seed: expected a list of values, got 'ab'"),
        ({"seed": [1]}, {"seed": [1]}, "'seed' is in `sweep` and in `zip`; keep one"),
        ({}, {"a": [1], "b": [1, 2]}, "zip: its lists differ in length: {'a': 1, 'b': 2}"),
    ],
)
def test_bad_lists_are_refused(grid: Any, together: Any, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        check_axes(grid, together, "s")

    assert problem in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"policy": "belady"},
        {"capacity__dram": "26 %"},
        {"synthetic__seed": 1},
        {"hardware": "phone-sd8-elite"},
        {"weights": "q4_0"},
        {"measure": {"warmup_steps": 1}},
        {"kv_bytes": 1},
    ],
)
def test_whatever_decides_the_outcome_changes_the_key(
    changes: dict[str, Any], make_run: Callable[..., RunConfig]
) -> None:
    before = key_of(make_run())

    assert key_of(make_run(**changes)) != before


@pytest.mark.parametrize(
    "changes", [{"name": "x"}, {"policy": {"eviction": {"kind": "lru"}}}, {"seed": 0}]
)
def test_whatever_does_not_decide_it_keeps_the_key(
    changes: dict[str, Any], make_run: Callable[..., RunConfig]
) -> None:
    before = key_of(make_run())

    assert key_of(make_run(**changes)) == before


def test_another_version_changes_the_key(
    make_run: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key_of(make_run())
    monkeypatch.setattr(moetier, "__version__", "999")

    assert key_of(make_run()) != before


def test_a_trace_counts_by_its_content(tmp_path: Path) -> None:
    tiny = load_geometry("moe-tiny")

    def key(name: str, tokens: int) -> str:
        path = write_trace(Synthetic(tiny, tokens=tokens), tmp_path / name)
        return key_of(check_run({"trace": str(path), "hardware": "phone-ufs4"}, "t"))

    assert key("a.parquet", 5) == key("b.parquet", 5)
    assert key("a.parquet", 6) != key("b.parquet", 5)


def test_a_popularity_trace_counts_too(tmp_path: Path, make_run: Callable[..., RunConfig]) -> None:
    path = write_trace(Synthetic(load_geometry("moe-tiny"), tokens=5), tmp_path / "p.parquet")
    before = key_of(make_run())

    assert key_of(make_run(popularity=str(path))) != before


def test_an_edited_profile_changes_the_key(
    tmp_path: Path, make_run: Callable[..., RunConfig]
) -> None:
    from importlib.resources import files

    text = (files("moetier.hw_profiles") / "phone-ufs4.yaml").read_text()
    mine, edited = tmp_path / "mine.yaml", tmp_path / "edited.yaml"
    mine.write_text(text)
    edited.write_text(
        text.replace("11.1 GB", "11.2 GB", 1).replace("capacity: 11.1", "capacity: 9")
    )

    assert key_of(make_run(hardware=str(mine))) == key_of(make_run(hardware="phone-ufs4"))
    assert key_of(make_run(hardware=str(edited))) != key_of(make_run(hardware="phone-ufs4"))


def test_axes_describe_a_point_for_a_table(run_keys: dict[str, Any]) -> None:
    (point,) = expand_points(run_keys, {"synthetic.reuse": [0.5], "tiers": [None]}, {}, "s")

    assert axes(point) == {
        "policy": "on-demand",
        "hardware": "phone-ufs4",
        "source": "moe-tiny",
        "capacity.dram": "25 %",
        "synthetic.reuse": 0.5,
        "tiers": None,
    }


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("policy", {"eviction": "lfu"}, "lfu"),
        ("seed", 3, 3),
        ("tiers", ["dram", "flash"], '["dram", "flash"]'),
        ("policy.eviction", {"kind": "lfu"}, '{"kind": "lfu"}'),
        ("weights", None, None),
    ],
)
def test_values_are_spelled_for_tables(key: str, value: Any, shown: Any) -> None:
    assert spell(key, value) == shown
