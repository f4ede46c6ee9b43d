"""This module tests the arithmetic of copying experts on demand."""

from __future__ import annotations

import pytest

from moetier.experiments.studies.speculating_experts import (
    FIT_CONTEXT,
    FIT_SHARE,
    MACHINE,
    MODEL,
    decode,
    fit_host,
    gain,
    with_host_time,
)
from moetier.sim.hardware import load_profile

PROFILE = load_profile(MACHINE)
BARE = decode(with_host_time(PROFILE, 0), FIT_CONTEXT)


def test_the_profile_has_the_host_time_that_the_fit_gives() -> None:
    stated = PROFILE.main_compute.host_time_per_layer

    assert round(fit_host(BARE), -3) == stated  # to the microsecond


def test_the_fit_meets_the_share_and_less_host_time_does_not() -> None:
    host = fit_host(BARE)
    fitted = decode(with_host_time(PROFILE, host), FIT_CONTEXT)
    less = decode(with_host_time(PROFILE, host - 20_000), FIT_CONTEXT)

    assert fitted.copies / fitted.total == pytest.approx(FIT_SHARE, abs=1e-6)
    assert less.copies / less.total > FIT_SHARE + 0.004


def test_copies_are_the_bytes_of_eight_experts_a_layer_over_the_link() -> None:
    link = PROFILE.links[0]

    assert BARE.copies == 48 * 8 * link.copy_ns(3 * 2048 * 768 * 2)


def test_longer_contexts_cost_compute_and_not_copies() -> None:
    far = decode(PROFILE, 65536)
    near = decode(PROFILE, 1024)

    assert far.copies == near.copies
    assert far.total > near.total
    assert far.saveable == far.total - far.copies  # compute is the smaller part everywhere


def test_speculation_saves_what_compute_hides_and_no_more() -> None:
    fitted = decode(PROFILE, FIT_CONTEXT)

    saved = gain(MODEL, PROFILE, FIT_CONTEXT)

    assert 0.9 * fitted.saveable / fitted.total < saved <= fitted.saveable / fitted.total


def test_without_compute_to_hide_behind_speculation_saves_little() -> None:
    assert gain(MODEL, with_host_time(PROFILE, 0), FIT_CONTEXT) < 0.06
