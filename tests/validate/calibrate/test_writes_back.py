"""A machine that writes back has a link down, measured as the link up is."""

from __future__ import annotations

from typing import Any

import pytest

from moetier.validate.calibrate.measure import Copies, measure
from moetier.validate.calibrate.profile import profile_of
from moetier.validate.calibrate.samples import Sample


def test_the_link_down_is_in_the_profile_and_half_as_fast(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "writes_back", True, raising=False)
    figures = measure(fake, 1, now=lambda: fake.now, rest=fake.rest)
    profile = profile_of("fake", fake, figures, "a model")
    fast, slow = (tier.name for tier in fake.tiers)
    up, down = profile.link(slow, fast), profile.link(fast, slow)

    assert set(figures.back) == set(figures.copies)
    assert down.latency == 2 * up.latency
    assert down.bandwidth.peak == pytest.approx(up.bandwidth.peak / 2, rel=1e-6)


def test_without_it_there_is_one_link(fake: Any) -> None:
    figures = measure(fake, 1, now=lambda: fake.now, rest=fake.rest)

    assert figures.back == {}
    assert len(profile_of("fake", fake, figures, "a model").links) == 1


def test_latency_and_rate_give_the_time_that_was_measured() -> None:
    times = {(1000, 1): 150, (3000, 1): 350, (3000, 2): 400}
    copies = Copies({key: Sample((ns,)) for key, ns in times.items()})

    assert copies.latency == 50
    for (nbytes, lanes), ns in times.items():
        again = copies.latency + nbytes * lanes * 1_000_000_000 / copies.rate(nbytes, lanes)
        assert again == pytest.approx(ns, abs=1)
