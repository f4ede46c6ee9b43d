"""This module tests the two signs of prefetching, and that they come from the link's idle time."""

from __future__ import annotations

from pathlib import Path

import pytest

from moetier.experiments.papers import load_paper
from moetier.experiments.studies import bigmoeonedge
from moetier.experiments.studies.bigmoeonedge import (
    CACHE,
    DATA,
    IDLE,
    MIB,
    PHONE,
    SATURATED,
    SLOWDOWN,
    covered,
    gain,
    pair,
    recorded,
    study,
    told,
)
from moetier.sim.hardware import Profile, load_profile
from moetier.traces.predictors.annotate import Annotated


@pytest.fixture(scope="module")
def routing(data: Path) -> Annotated:
    return recorded(str(data))


@pytest.mark.slow
def test_prefetching_loses_on_a_saturated_link_and_wins_on_one_with_idle_time(
    routing: Annotated,
) -> None:
    full, ahead = pair(routing, SATURATED)
    roomy, early = pair(routing, IDLE)

    assert gain(full, ahead) < -0.1
    assert gain(roomy, early) > 0.04
    assert full.link_busy > 0.75 > roomy.link_busy
    assert ahead.wait_ms > full.wait_ms
    assert early.wait_ms < roomy.wait_ms
    assert ahead.nbytes == early.nbytes  # the same decisions on both


@pytest.mark.slow
def test_on_the_phone_it_gains_unless_copies_slow_compute_down(routing: Annotated) -> None:
    """Its link has idle time, so a loss as large as the recorded one needs another cause.

    This test says what is known, not what was hoped for.
    """
    plain, ahead = pair(routing, PHONE)
    slow_plain, slow_ahead = pair(routing, PHONE, slowdown=SLOWDOWN)

    assert plain.link_busy < 0.65
    assert 0.04 < gain(plain, ahead) < 0.1
    assert -0.05 < gain(slow_plain, slow_ahead) < 0.02
    assert slow_plain.nbytes == plain.nbytes
    assert pair(routing, PHONE, 250 * MIB)[0].hits == 0


@pytest.mark.slow
def test_a_phone_that_computes_in_no_time_loses(
    routing: Annotated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same flash, and eight times the compute: nothing is left to hide copies behind."""
    fast = load_profile(PHONE).model_dump(mode="json")
    fast["compute"]["cpu"]["peak"] = "520 GOP/s"
    profile = Profile.model_validate(fast)
    monkeypatch.setattr(bigmoeonedge, "load_profile", lambda name: profile)
    plain, ahead = pair(routing, PHONE)

    assert gain(plain, ahead) < -0.05


def test_without_the_data_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA, raising=False)
    paper = load_paper("bigmoeonedge")
    rows = study(paper)

    assert [item.name for item in rows] == list(paper.figures)
    assert all(item.kind == "not-testable" and DATA in str(item.reason) for item in rows)


def test_time_that_several_copies_share_counts_once() -> None:
    assert covered([(5, 9), (0, 4), (2, 4), (3, 6), (20, 21)]) == 9 + 1
    assert covered([]) == 0


def test_a_pair_is_told_in_a_sentence() -> None:
    plain = bigmoeonedge.Outcome(100.0, 50.0, 10.0 * MIB, 0.0, 0.5, 0.4)
    ahead = bigmoeonedge.Outcome(125.0, 60.0, 15.0 * MIB, 2.0 * MIB, 0.9, 0.8)

    assert list(told("toy", CACHE, plain, ahead)) == [
        "toy, cache 4000 MiB: prefetching changes tokens/s by -20.0%; link busy 40% of the time, "
        "then 80%; 10, then 15 MiB a token, 2 of them wasted; compute waits 50.00, then 60.00 ms "
        "of 100.00 and 125.00"
    ]
