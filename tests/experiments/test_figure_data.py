"""Tests of preparing columns for figures."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from moetier.experiments.figure_data import (
    axis,
    check_column,
    differing,
    done_rows,
    entry,
    groups,
)
from moetier.traces.errors import InputError


def table(**columns: list[Any]) -> pd.DataFrame:
    return pd.DataFrame(columns)


def test_numbers_are_scaled_to_their_unit() -> None:
    found = axis(table(bytes_per_token=[2e6, None]), "bytes_per_token")

    assert found.values == [2.0, None]
    assert found.title == "bytes read per token (MB)"
    assert found.better == "lower"
    assert found.ticks is None


def test_a_standard_error_goes_both_ways() -> None:
    found = axis(table(accuracy=[0.9, None], accuracy_se=[0.02, None]), "accuracy")

    assert found.errors == [(0.02, 0.02), (0.0, 0.0)]


def test_an_interval_keeps_its_two_sides() -> None:
    found = axis(
        table(
            **{
                "nll_difference.mean": [1.0, None],
                "nll_difference.low": [0.75, None],
                "nll_difference.high": [1.5, None],
            }
        ),
        "nll_difference.mean",
    )

    assert found.errors == [(0.25, 0.5), (0.0, 0.0)]


def test_without_its_columns_a_value_has_no_error() -> None:
    assert axis(table(accuracy=[0.9]), "accuracy").errors is None
    assert axis(table(**{"nll_difference.mean": [1.0]}), "nll_difference.mean").errors is None


def test_shares_of_a_tier_become_percent() -> None:
    found = axis(table(**{"capacity.dram": ["25 %", "12.5 %"]}), "capacity.dram")

    assert found.values == [25.0, 12.5]
    assert found.title == "expert cache in dram (% of all expert bytes)"


def test_sizes_of_a_tier_become_gib() -> None:
    found = axis(table(**{"capacity.hbm": ["512 MiB", "2 GiB"]}), "capacity.hbm")

    assert found.values == [0.5, 2.0]
    assert found.title == "expert cache in hbm (GiB)"


def test_sizes_and_shares_do_not_mix() -> None:
    with pytest.raises(InputError, match="sizes and shares cannot share an axis"):
        axis(table(**{"capacity.hbm": ["512 MiB", "2 %"]}), "capacity.hbm")


def test_names_become_places_with_ticks() -> None:
    found = axis(table(policy=["b", "a", "b"]), "policy")

    assert found.values == [0.0, 1.0, 0.0]
    assert found.ticks == [(0.0, "b"), (1.0, "a")]
    assert found.better is None


def test_groups_keep_the_order_of_appearance() -> None:
    rows = table(policy=["b", "a", "b"])

    assert groups(rows, "policy") == [("b", [0, 2]), ("a", [1])]
    assert groups(rows, None) == [("", [0, 1, 2])]


def test_failed_points_are_not_drawn() -> None:
    rows = done_rows(table(status=["failed", "done"], x=[1, 2]))

    assert rows["x"].tolist() == [2]
    assert rows.index.tolist() == [0]


def test_nothing_done_is_an_error() -> None:
    with pytest.raises(InputError, match="no point is done"):
        done_rows(table(status=["failed"]))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (None, "x: this key is missing; name a metric or a config key"),
        ("tpot", "x: no column 'tpot'; did you mean 'tpot_ms'?"),
        ("zzz", "x: no column 'zzz'; known: tpot_ms, capacity.dram"),
    ],
)
def test_a_missing_column_is_named(name: str | None, problem: str) -> None:
    rows = table(tpot_ms=[1], error=[""], **{"capacity.dram": ["1 %"]})

    with pytest.raises(InputError) as caught:
        check_column(rows, name, "x")

    assert str(caught.value).startswith(problem)


def test_what_differs_is_looked_for_before_the_status() -> None:
    rows = table(
        policy=["a", "b"], hardware=["h", "h"], seed=[None, 1], status=["x", "y"], t=[1, 2]
    )

    assert differing(rows) == ["policy", "seed"]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("policy", "lru", "lru"),
        ("hardware", "gh200", "gh200"),
        ("capacity.dram", "25 %", "dram 25 %"),
        ("seed", 3, "seed 3"),
    ],
)
def test_entries_are_short(name: str, value: Any, text: str) -> None:
    assert entry(name, value) == text
