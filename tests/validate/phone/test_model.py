"""A profile follows the level it is set to, and misses are drawn without losing any."""

from __future__ import annotations

import numpy as np
import pytest

from moetier.sim.hardware import Profile, load_profile
from moetier.traces.errors import InputError
from moetier.traces.schema import Header
from moetier.validate.phone.model import (
    at_level,
    compute_ms,
    experts_read,
    hierarchy_of,
    layout_of,
    read_link,
    spread,
    with_lanes,
    with_management,
)


@pytest.mark.parametrize("level", [0.5, 12.5, 300.0])
def test_compute_follows_its_level(header: Header, phone: Profile, level: float) -> None:
    changed = at_level(header, phone, 2, 8, level, 0.0)

    assert compute_ms(header, changed, 2, 8) == pytest.approx(level, rel=1e-4)
    assert read_link(changed) == read_link(phone)


def test_every_part_of_compute_changes_by_one_factor(header: Header, phone: Profile) -> None:
    one, two = (compute_ms(header, phone, k, 8) for k in (1, 2))
    level = at_level(header, phone, 2, 8, 5 * two, 0.0)

    assert compute_ms(header, level, 1, 8) == pytest.approx(5 * one, rel=1e-4)


def test_management_is_paid_twice_per_layer_and_is_not_compute(
    header: Header, phone: Profile
) -> None:
    changed = at_level(header, phone, 2, 8, 10.0, 8.0)

    assert changed.main_compute.overhead == 2_000_000  # 8 ms over 2 layers, in halves
    assert compute_ms(header, changed, 2, 8) == pytest.approx(10.0, rel=1e-4)


def test_measured_times_that_do_not_follow_are_refused(header: Header, phone: Profile) -> None:
    main = phone.main_compute.model_dump(mode="json")
    main["dense"] = [{"nbytes": "1 MiB", "time": "5 ms"}]
    fixed = Profile.model_validate(phone.model_dump(mode="json") | {"compute": {"cpu": main}})

    with pytest.raises(InputError, match="without measured times"):
        at_level(header, fixed, 2, 8, 300.0, 0.0)


def test_lanes_and_management_change_nothing_else(phone: Profile) -> None:
    changed = with_management(with_lanes(phone, 2), 500)

    assert read_link(changed).lanes == 2
    assert changed.main_compute.overhead == 500
    assert with_management(with_lanes(changed, 4), 0) == phone


def test_a_third_tier_is_left_out() -> None:
    profile = load_profile("desktop-nvme")

    assert hierarchy_of(profile, overlap=True).names == tuple(list(profile.tiers)[:2])


def test_bytes_are_experts_with_their_pages(header: Header) -> None:
    each = 3 * (1 << 20) + 3 * 4096

    assert experts_read(layout_of(header), [0, each, 3.6 * each]) == [0, 1, 4]


def test_drawn_misses_add_up_and_no_layer_misses_more_than_it_looks_up() -> None:
    counts = spread([0, 5, 12, 99], layers=4, top_k=3)

    assert counts.shape == (4, 4)
    assert counts.sum(axis=1).tolist() == [0, 5, 12, 12]
    assert counts.max() == 3


def test_drawn_misses_depend_on_the_seed_alone() -> None:
    assert np.array_equal(spread([20] * 9, 48, 8, seed=3), spread([20] * 9, 48, 8, seed=3))
    assert not np.array_equal(spread([20] * 9, 48, 8, seed=3), spread([20] * 9, 48, 8, seed=4))


def test_every_layer_is_equally_likely_to_miss() -> None:
    share = spread([4] * 4000, layers=4, top_k=2).mean(axis=0)

    assert share == pytest.approx([1.0] * 4, abs=0.05)


def test_no_tokens_give_no_rows() -> None:
    assert spread([], layers=4, top_k=2).shape == (0, 4)
