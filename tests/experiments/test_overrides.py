"""Tests of setting values by dotted keys."""

from __future__ import annotations

from typing import Any

import pytest

from moetier.experiments.overrides import apply_overrides, set_key
from moetier.traces.errors import InputError


@pytest.mark.parametrize(
    ("before", "key", "value", "after"),
    [
        ({}, "a", 1, {"a": 1}),
        ({"a": 1}, "a", 2, {"a": 2}),
        ({}, "a.b.c", 1, {"a": {"b": {"c": 1}}}),
        ({"a": {"x": 0}}, "a.b", 1, {"a": {"x": 0, "b": 1}}),
        ({"a": None}, "a.b", 1, {"a": {"b": 1}}),
        (
            {"policy": "belady"},
            "policy.warmup",
            "empty",
            {"policy": {"preset": "belady", "warmup": "empty"}},
        ),
        ({"policy": {"eviction": "lfu"}}, "policy", "belady", {"policy": "belady"}),
        (
            {"base": {"policy": "belady"}},
            "base.policy.miss",
            "cpu",
            {"base": {"policy": {"preset": "belady", "miss": "cpu"}}},
        ),
    ],
)
def test_a_dotted_key_sets_a_nested_value(
    before: dict[str, Any], key: str, value: Any, after: dict[str, Any]
) -> None:
    set_key(before, key, value)

    assert before == after


@pytest.mark.parametrize("key", ["", ".", "a.", ".a", "a..b"])
def test_an_empty_part_is_refused(key: str) -> None:
    with pytest.raises(InputError, match="is not a key"):
        set_key({}, key, 1)


def test_a_key_through_a_number_is_refused() -> None:
    with pytest.raises(InputError, match=r"'seed\.x' leads into 'seed', which is 3; set 'seed'"):
        set_key({"seed": 3}, "seed.x", 1)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("k=25 %", "25 %"),
        ("k=2 GiB", "2 GiB"),
        ("k=3", 3),
        ("k=0.5", 0.5),
        ("k=true", True),
        ("k=null", None),
        ("k=[a, b]", ["a", "b"]),
        ("k={kind: lfu}", {"kind": "lfu"}),
        ("k=a=b", "a=b"),
        ("k=", None),
    ],
)
def test_values_are_yaml(text: str, value: Any) -> None:
    assert apply_overrides({}, [text]) == {"k": value}


def test_later_overrides_win_and_the_original_stays() -> None:
    original: dict[str, Any] = {"a": {"b": 1}}

    changed = apply_overrides(original, ["a.b=2", "a.b=3", "c=4"])

    assert changed == {"a": {"b": 3}, "c": 4}
    assert original == {"a": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("seed", "--set: 'seed' has no value; write --set key=value"),
        ("a={", "--set a: '{' is not valid YAML"),
        ("a..b=1", "--set: 'a..b' is not a key"),
        ("=1", "--set: '' is not a key"),
    ],
)
def test_a_bad_override_is_quoted(text: str, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        apply_overrides({}, [text])

    assert str(caught.value).startswith(problem)
