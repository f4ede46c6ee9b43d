"""A pace is a lower bound that is kept, however busy the machine is."""

import time

import pytest

from moetier.sim.hardware import Link
from moetier.traces.errors import InputError
from moetier.validate.machines.clock import Clock
from moetier.validate.machines.pacing import NAP_NS, Pace, wait_until


@pytest.mark.parametrize("nbytes", [1, 999, 4096, 1_474_560])
def test_a_pace_takes_as_long_as_a_link_of_that_rate(nbytes: int) -> None:
    link = Link.model_validate(
        {"src": "a", "dst": "b", "bandwidth": "333 MB/s", "latency": "70 us", "source": "by hand"}
    )

    assert Pace(333_000_000, 70_000).ns(nbytes) == link.copy_ns(nbytes)


@pytest.mark.parametrize(("rate", "latency"), [(0, 0), (-1, 0), (1, -1)])
def test_a_pace_that_cannot_be_kept_is_refused(rate: int, latency: int) -> None:
    with pytest.raises(InputError, match="pace: "):
        Pace(rate, latency)


@pytest.mark.parametrize("after", [-5, 0, 50_000, 1_000_000])
def test_waiting_never_ends_before_the_deadline(after: int) -> None:
    clock = Clock()
    deadline = clock.now() + after
    at = wait_until(deadline, clock.now)

    assert deadline <= at <= clock.now()


def test_no_sleep_reaches_past_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    at, slept = [0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        at[0] += max(round(seconds * 1e9), 1000)

    monkeypatch.setattr(time, "sleep", sleep)
    end = wait_until(50_000_000, lambda: at[0])

    assert 50_000_000 <= end < 50_001_000
    assert max(slept) * 1e9 <= NAP_NS
    assert slept[-1] == 0  # the last stretch is not slept away


def test_waiting_ends_when_told_to() -> None:
    clock, asked = Clock(), []

    def stop() -> bool:
        asked.append(clock.now())
        return len(asked) == 3

    at = wait_until(1 << 60, clock.now, stop)

    assert 2 * NAP_NS <= at < 1 << 60


def test_a_stopped_clock_stands_still() -> None:
    clock, wall = Clock(), Clock()
    with clock.stopped():
        stood = clock.now()
        wait_until(wall.now() + 2_000_000, wall.now)

        assert clock.now() == stood

    assert clock.now() <= wall.now() - 2_000_000 + stood


def test_a_clock_can_begin_again() -> None:
    clock = Clock()
    wait_until(clock.now() + 1_000_000, clock.now)
    before = clock.now()
    clock.restart()

    assert clock.now() < before
