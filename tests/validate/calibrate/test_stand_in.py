"""Tests of the machine that plans are checked on before the real one is measured."""

from __future__ import annotations

import pytest

from moetier.sim.run import Setting, simulate
from moetier.sim.testing import toy_header, toy_trace
from moetier.traces.errors import InputError
from moetier.validate.calibrate.stand_in import PLENTY, stand_in

TRACE = toy_trace(toy_header(n_experts=4), [[[e]] for e in (0, 1, 2, 0, 0)])


def test_it_has_two_tiers_of_the_sizes_given() -> None:
    profile = stand_in({"hbm": 1000, "dram": None})

    assert {name: tier.capacity for name, tier in profile.tiers.items()} == {
        "hbm": 1000,
        "dram": PLENTY,
    }
    assert [(link.src, link.dst) for link in profile.links] == [("dram", "hbm")]
    assert profile.main_compute.tier == "hbm"


def test_runs_are_planned_and_refused_on_it_as_on_any_other() -> None:
    fits = Setting(stand_in({"dram": 1000, "disk": None}), capacity={"dram": 80})
    assert simulate(TRACE, fits).metrics["misses"] == 4

    for capacity in ({"dram": 30}, {"dram": 2000}, {"hbm": 80}):
        with pytest.raises(InputError):
            simulate(TRACE, Setting(fits.profile, capacity=capacity))
