"""Tests of writing a config out in full."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from moetier.experiments.config import RunConfig, check_run
from moetier.experiments.resolve import full_policy, resolved
from moetier.sim.policy.compose import compose, presets
from moetier.sim.policy.seams import DEFAULTS, SEAMS
from moetier.traces.registry import Registry


def test_every_default_is_filled_in(make_run: Callable[..., RunConfig]) -> None:
    full = resolved(make_run())

    assert full["seed"] == 0
    assert full["kv_bytes"] == 2
    assert full["measure"] == {"warmup_steps": 0}
    assert full["synthetic"]["skew"] == 1.0
    assert full["capacity"] == {"dram": "25 %"}
    assert full["policy"] == {**DEFAULTS, "eviction": "lru"}
    assert "trace" not in full


def test_reading_it_back_gives_the_same(make_run: Callable[..., RunConfig]) -> None:
    full = resolved(make_run(policy={"preset": "previous-token", "eviction": "lfu"}, seed=5))

    again = resolved(check_run(yaml.safe_load(yaml.safe_dump(full)), "again"))

    assert again == full


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_expands_to_a_policy(name: str) -> None:
    full = full_policy(name)

    assert set(full) == set(SEAMS)
    compose(full)


@pytest.mark.parametrize(
    ("spec", "seam", "expected"),
    [
        ("previous-token", "prefetch", {"kind": "previous-token", "depth": 1}),
        ({"eviction": "lfu"}, "eviction", {"kind": "lfu", "remember": True}),
        (
            {"eviction": {"kind": "lfu", "remember": False}},
            "eviction",
            {"kind": "lfu", "remember": False},
        ),
        ({"eviction": {"dram": "lfu"}}, "eviction", {"dram": {"kind": "lfu", "remember": True}}),
        ({"precision": {"kind": "uniform", "bits": 4}}, "precision", {"bits": 4, "group": 32}),
    ],
)
def test_parts_come_with_their_parameters(
    spec: str | dict[str, Any], seam: str, expected: dict[str, Any]
) -> None:
    found = full_policy(spec)[seam]

    assert expected.items() <= found.items()


def test_a_name_and_its_expansion_are_the_same_policy(make_run: Callable[..., RunConfig]) -> None:
    short = resolved(make_run(policy="belady"))
    long = resolved(make_run(policy={"eviction": {"kind": "belady"}}))

    assert short == long


def test_defaults_of_any_kind_can_be_written_as_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: Registry[Any] = Registry("prefetch", "moetier.sim.policy.prefetch")
    parts.names()

    @parts.register("toy")
    class Toy:
        """Have odd defaults."""

        def __init__(
            self, bits: tuple[int, ...] = (6, 3), by: Any = MappingProxyType({1: Fraction(1, 2)})
        ) -> None: ...

    monkeypatch.setitem(SEAMS, "prefetch", parts)

    full = full_policy({"prefetch": "toy"})["prefetch"]

    assert full == {"kind": "toy", "bits": [6, 3], "by": {"1": "1/2"}}
