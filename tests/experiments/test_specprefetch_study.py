"""This module tests the fit of a phone's storage to what is published without prefetching."""

from __future__ import annotations

from fractions import Fraction

import pytest

from moetier.experiments.studies.specprefetch import BASELINES, WINDOW, Phone, phones


@pytest.mark.slow
@pytest.mark.parametrize("storage", BASELINES)
def test_the_fit_meets_the_throughput_it_was_fitted_to(storage: str) -> None:
    phone = Phone(18, Fraction(1, 4), BASELINES[storage])

    assert 1000 / phone.run("none")["tpot_ms"] == pytest.approx(BASELINES[storage], rel=1e-6)


@pytest.mark.slow
def test_a_slower_storage_is_fitted_slower_and_gains_more() -> None:
    fast, slow = (Phone(18, Fraction(3, 8), BASELINES[name]) for name in ("nvme", "slow_ufs"))

    assert fast.profile.links[0].bandwidth.peak > slow.profile.links[0].bandwidth.peak
    assert slow.gain(WINDOW) > fast.gain(WINDOW)


def test_every_pair_of_unknowns_is_tried() -> None:
    pairs = {(phone.host_ms, phone.cache) for phone in phones("nvme")}

    assert len(pairs) == 9
