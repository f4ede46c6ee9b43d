"""Tests of what a profile says of a machine whose every time is a formula."""

from __future__ import annotations

from typing import Any

import pytest

from moetier.sim.hardware import Profile
from moetier.sim.run import Setting, simulate
from moetier.sim.testing import toy_header, toy_trace
from moetier.traces.errors import InputError
from moetier.validate.calibrate.measure import TOKENS, Figures, lane_counts, measure
from moetier.validate.calibrate.profile import profile_of


@pytest.fixture
def figures(fake: Any) -> Figures:
    return measure(fake, 1, now=lambda: fake.now, rest=fake.rest, together=2)


@pytest.fixture
def profile(fake: Any, figures: Figures) -> Profile:
    return profile_of("fake", fake, figures, "a model")


def test_tiers_are_the_device_s_and_say_how_their_size_is_known(
    fake: Any, profile: Profile
) -> None:
    fast, slow = fake.tiers

    assert list(profile.tiers) == [fast.name, slow.name]
    for memory in (fast, slow):
        tier = profile.tiers[memory.name]
        assert tier.capacity == memory.capacity
        assert tier.source.startswith(f"capacity: {memory.source}; bandwidth: ")
    assert profile.tiers[slow.name].bandwidth == max(
        point.rate for point in profile.links[0].bandwidth.points
    )


def test_every_size_is_measured_on_every_number_of_lanes(
    fake: Any, figures: Figures, profile: Profile
) -> None:
    points = profile.links[0].bandwidth.points

    assert {point.lanes for point in points} == set(lane_counts(fake.lanes))
    assert {(point.size, point.lanes) for point in points} == set(figures.copies)
    assert {point.size for point in points} >= {1_000_000, 500_000}  # an expert, and half of one
    assert profile.links[0].lanes == fake.lanes


def test_every_row_of_experts_is_its_part_of_a_batch(figures: Figures, profile: Profile) -> None:
    compute = profile.main_compute
    rows = {row.tokens: row for row in compute.experts}

    assert list(rows) == list(TOKENS)
    for tokens, row in rows.items():
        sample = figures.experts["whole", tokens, 2]
        assert compute.overhead + 2 * row.time == pytest.approx(sample.ns, abs=2)
        assert row.repeats == len(sample.values)


def test_a_batch_is_simulated_as_it_was_measured(fake: Any, figures: Figures) -> None:
    """Two experts on one token, and the host time, with everything in memory."""
    profile = profile_of("fake", fake, figures, "a model")
    header = toy_header(1_000_000, n_experts=2, top_k=2, dense_bytes=2_000_000)
    source = toy_trace(header, [[[0, 1]]] * 3)
    rows: list[Any] = []
    setting = Setting(profile, {"warmup": "random"}, {"dram": 2_000_000})
    simulate(source, setting, sinks=[rows.append])

    took = rows[0]["expert_ns"][-1]
    assert took == pytest.approx(figures.experts["whole", 1, 2].ns, abs=2)


def test_sources_say_when_and_of_what(fake: Any, profile: Profile) -> None:
    date = fake.identity["date"]

    assert "experts and dense parts of a model" in profile.source
    for said in (
        profile.source, profile.links[0].source, profile.main_compute.source,
        *(tier.source for tier in profile.tiers.values()),
    ):  # fmt: skip
        assert date in said
    assert profile.contention is not None
    assert "2 experts with all 3 lanes busy against alone" in profile.contention.source


def test_what_the_device_refuses_is_no_profile(
    fake: Any, figures: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise InputError("the disk was late")

    monkeypatch.setattr(fake, "remarks", refuse)
    with pytest.raises(InputError, match="the disk was late"):
        profile_of("fake", fake, figures, "a model")


def test_without_a_date_none_is_made_up(fake: Any, figures: Figures) -> None:
    fake.identity = {"cpu": "a formula"}

    assert "an unknown date" in profile_of("fake", fake, figures, "a model").source
