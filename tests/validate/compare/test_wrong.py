"""Tests of machines that are wrong on purpose."""

from __future__ import annotations

import pytest

from moetier.sim.hardware import Profile
from moetier.sim.testing import toy_profile
from moetier.validate.compare.wrong import WRONG, no_contention, twice_the_bandwidth

ROWS = [
    {"size": "1 KiB", "lanes": 1, "rate": "3 B/s", "spread": "1 %"},
    {"size": "1 KiB", "lanes": 2, "rate": "5 B/s"},
    {"size": "1 MiB", "lanes": 1, "rate": "8 B/s"},
]


def profile(slowdown: str | None = None) -> Profile:
    data = toy_profile().model_dump(mode="json", exclude_none=True)
    data["links"][0] |= {"bandwidth": ROWS, "latency": "7 ns"}
    if slowdown is not None:
        data["contention"] = {"compute_slowdown": slowdown, "source": "made up"}
    return Profile.model_validate(data)


@pytest.mark.parametrize(("nbytes", "lanes"), [(1024, 1), (1024, 2), (1 << 20, 1), (5000, 2)])
def test_every_transfer_is_twice_as_fast_but_for_its_latency(nbytes: int, lanes: int) -> None:
    (link,), (wrong,) = profile().links, twice_the_bandwidth(profile()).links
    took, takes = link.copy_ns(nbytes, lanes) - 7, wrong.copy_ns(nbytes, lanes) - 7

    assert takes == pytest.approx(took / 2, abs=1)


def test_nothing_else_changes() -> None:
    right, wrong = profile("20 %"), twice_the_bandwidth(profile("20 %"))

    assert wrong.model_copy(update={"links": right.links}) == right
    assert (
        wrong.links[0].model_copy(update={"bandwidth": right.links[0].bandwidth})
        == (right.links[0])
    )
    assert right == profile("20 %")  # as it was


def test_contention_goes_and_where_there_was_none_nothing_changes() -> None:
    assert no_contention(profile("20 %")) == profile()
    for plain in (profile(), profile("0 %")):
        assert no_contention(plain) is plain


def test_all_have_names() -> None:
    assert set(WRONG) == {"bandwidth doubled", "contention off"}
