"""From repeats of a machine that is a formula back to the formula."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from moetier.sim.hardware import load_profile
from moetier.validate.calibrate.device import DensePoint
from moetier.validate.calibrate.measure import (
    TOGETHER,
    Figures,
    dense_points,
    lane_counts,
    measure,
    power,
)
from moetier.validate.calibrate.power import energy_uj
from moetier.validate.calibrate.profile import profile_of, write_profile

LATENCY, RATE = 50_000, 100
OVERHEAD, EXPERT, TOKEN = 7_000, 100_000, 1_000
IDLE, BUSY = 5, 9


def figures_of(device: Any, seconds: float = 1) -> Figures:
    return measure(device, seconds, now=lambda: device.now, rest=device.rest)


def test_latency_and_rate_give_the_time_that_was_measured(fake: Any) -> None:
    figures = figures_of(fake)

    assert figures.latency == LATENCY
    assert {lanes for _, lanes in figures.copies} == {1, 2, 3}
    for nbytes, lanes in figures.copies:
        assert figures.rate(nbytes, lanes) == pytest.approx(RATE * 10**6 * lanes, rel=1e-4)


def test_the_profile_copies_as_the_machine_did(fake: Any) -> None:
    profile = profile_of("fake", fake, figures_of(fake), "a model")
    link = profile.links[0]

    for nbytes in (1 << 16, 500_000, 1_000_000):
        for lanes in (1, 2, 3):
            assert link.copy_ns(nbytes, lanes) == pytest.approx(fake.copy(nbytes, lanes), rel=1e-3)


def test_a_batch_is_its_overhead_and_its_experts(fake: Any) -> None:
    figures = figures_of(fake)

    assert figures.overhead == OVERHEAD
    assert [figures.expert("whole", n) for n in (1, 16, 128)] == [
        EXPERT + TOKEN * n for n in (1, 16, 128)
    ]


def test_a_batch_may_be_as_large_as_a_token_asks_for(fake: Any) -> None:
    asked: list[tuple[str, int, int]] = []
    usual = fake.experts

    def experts(*given: Any) -> int:
        asked.append(given)
        return int(usual(*given))

    fake.experts = experts
    figures = measure(fake, 1, now=lambda: fake.now, rest=fake.rest, together=3)
    profile = profile_of("fake", fake, figures, "a model")

    assert {count for _, _, count in figures.experts} == {1, 3}
    assert {count for _, count, _ in asked} == {1, 3}
    assert (figures.overhead, figures.expert("whole", 16)) == (OVERHEAD, EXPERT + TOKEN * 16)
    assert "a part of a batch of 3" in profile.main_compute.source


def test_what_another_kernel_costs_per_batch_is_in_its_experts(fake: Any) -> None:
    """A batch of as many experts as were timed together takes what it took, whoever computes."""
    fake.kernels = {"whole": 1_000_000, "slow": 400_000}
    usual = fake.experts

    def experts(kernel: str, count: int, tokens: int) -> int:
        return int(usual(kernel, count, tokens)) + (50_000 if kernel == "slow" else 0)

    fake.experts = experts
    figures = figures_of(fake)

    assert figures.overhead == OVERHEAD
    batch = OVERHEAD + 50_000 + TOGETHER * (EXPERT + TOKEN)
    assert figures.overhead + TOGETHER * figures.expert("slow", 1) == pytest.approx(batch, abs=8)


def test_contention_is_what_compute_and_copies_take_longer(fake: Any) -> None:
    figures = figures_of(fake)

    assert figures.compute_slowdown == Fraction(1, 4)
    assert figures.copy_slowdown == Fraction(1, 10)


def test_what_is_quicker_beside_copies_is_not_slowed_down(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fake, "experts", lambda *_: fake._took(90_000 if fake.is_copying else 100_000)
    )

    assert figures_of(fake).compute_slowdown == 0


def test_the_profile_has_every_row_with_repeats_and_spread(fake: Any) -> None:
    profile = profile_of("fake", fake, figures_of(fake), "a model")
    compute = profile.main_compute

    assert compute.overhead == OVERHEAD
    assert compute.host_time_per_layer == 33_000
    assert {(row.kernel, row.nbytes) for row in compute.experts} == {("whole", 1_000_000)}
    assert len(compute.dense) == len(dense_points())
    assert {row.nbytes for row in compute.dense} == {2_000_000, 9_000_000}
    assert all(row.repeats is not None and row.repeats >= 3 for row in compute.experts)
    assert all(row.spread == 0 for row in compute.dense)  # a formula does not vary
    assert profile.contention is not None
    assert profile.contention.compute_slowdown == Fraction(1, 4)
    assert "10.0 % longer" in profile.contention.source
    assert "read by nobody" in profile.links[0].source
    assert profile.identity == dict(fake.identity)


def test_power_is_joules_over_time(fake: Any) -> None:
    profile = profile_of("fake", fake, figures_of(fake), "a model")
    per_second = 1_000_000 * 10**9 / (EXPERT + TOKEN)  # operations

    assert profile.static_power == pytest.approx(IDLE * 10**6, rel=1e-3)  # microwatts
    assert profile.main_compute.energy == pytest.approx((BUSY - IDLE) * 1e15 / per_second, rel=1e-3)


def test_without_a_counter_power_is_unknown_and_that_is_said(silent: Any) -> None:
    figures = figures_of(silent)
    profile = profile_of("fake", silent, figures, "a model")

    assert (figures.idle_uw, figures.busy_uw) == (None, None)
    assert profile.notes is not None
    assert "unknown" in profile.notes


def test_a_counter_that_began_again_says_nothing(fake: Any, monkeypatch: Any) -> None:
    counts = iter([100, 5])
    monkeypatch.setattr(fake, "energy", lambda: next(counts))

    assert power(fake, lambda: fake.rest(1), lambda: fake.now) is None


def test_packages_are_counted_once(tmp_path: Path) -> None:
    for name, joules in (("intel-rapl:0", 5), ("intel-rapl:1", 7), ("intel-rapl:0:0", 99)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{joules}\n")

    assert energy_uj(tmp_path) == 12
    assert energy_uj(tmp_path / "none") is None
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    assert energy_uj(tmp_path) is None


@pytest.mark.parametrize(("lanes", "expected"), [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8])])
def test_lanes_are_doubled_up_to_all(lanes: int, expected: list[int]) -> None:
    assert lane_counts(lanes) == expected


def test_a_point_of_the_head_comes_with_every_context_of_decode() -> None:
    points = dense_points()
    for point in points:
        if point.phase == "decode":
            assert point._replace(head=not point.head) in points
    assert DensePoint("prefill", True, 1, 1) in points
    assert len(set(points)) == len(points)


def test_a_model_without_a_head_of_its_own_leaves_those_points_out(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "dense_bytes", lambda head: None if head else 2_000_000)
    figures = figures_of(fake)

    assert figures.dense
    assert not any(point.head for point in figures.dense)


def test_progress_ends_at_the_end(fake: Any) -> None:
    told: list[tuple[int, int]] = []
    measure(fake, 1, lambda done, total: told.append((done, total)), lambda: fake.now, fake.rest)

    assert [done for done, _ in told] == list(range(1, told[-1][1] + 1))


def test_the_time_is_kept_where_repeats_are_short(fake: Any) -> None:
    figures_of(fake, 60)

    assert fake.now < 75e9


def test_a_written_profile_is_read_back_the_same(fake: Any, tmp_path: Path) -> None:
    profile = profile_of("fake", fake, figures_of(fake), "a model")
    write_profile(tmp_path / "fake.yaml", profile)

    assert load_profile(tmp_path / "fake.yaml") == profile
    assert [path.name for path in tmp_path.iterdir()] == ["fake.yaml"]
