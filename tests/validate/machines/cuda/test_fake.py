"""The fake device keeps what a GPU promises: order in a stream, none between, and errors stay."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from threading import Event, Thread
from time import perf_counter_ns
from typing import Any

import pytest
import torch
from torch import Tensor

from moetier.validate.machines.cuda.fake import WATTS, FakeDevice
from moetier.validate.machines.pacing import Pace

N = 1 << 12


@pytest.fixture
def fake() -> Iterator[Callable[..., FakeDevice]]:
    made: list[FakeDevice] = []

    def make(**given: Any) -> FakeDevice:
        made.append(FakeDevice(**given))
        return made[-1]

    yield make
    for one in made:
        one.close()


def filled(device: FakeDevice, value: int) -> Tensor:
    found = device.pinned(N)
    found.fill_(value)
    return found


def test_copies_of_a_stream_are_done_in_order(fake: Callable[..., FakeDevice]) -> None:
    device = fake()
    to, stream = device.memory(N), device.stream()
    for value in range(20):
        stream.copy(to, filled(device, value))
    stream.synchronise()

    assert to.tolist() == [19] * N
    assert device.copies == 20


def test_an_event_is_reached_when_all_before_it_is_done(fake: Callable[..., FakeDevice]) -> None:
    device = fake(pace=Pace(1 << 40, 20_000_000))
    to, stream = device.memory(N), device.stream()
    before = stream.record()
    stream.copy(to, filled(device, 7))
    behind = stream.record()

    assert before.done()  # nothing was under way
    assert not behind.done()

    behind.wait()

    assert behind.done()
    assert to[0] == 7
    assert behind.since(before) >= 20_000_000


def test_a_stream_keeps_its_pace_over_many_copies(fake: Callable[..., FakeDevice]) -> None:
    pace = Pace(100_000_000, 100_000)
    device = fake(pace=pace)
    to, source, stream = device.memory(N), filled(device, 1), device.stream()
    begin = perf_counter_ns()
    for _ in range(10):
        stream.copy(to, source)
    stream.synchronise()

    assert perf_counter_ns() - begin >= 10 * pace.ns(N)


def test_streams_do_not_wait_for_one_another(fake: Callable[..., FakeDevice]) -> None:
    together = threading.Barrier(2, timeout=30)  # breaks unless both copy at once

    def meet(_: int) -> None:
        together.wait()

    device = fake(fails=meet)
    streams = [device.stream(), device.stream()]
    for stream in streams:
        stream.copy(device.memory(N), filled(device, 1))
    device.synchronise()
    for stream in streams:
        stream.synchronise()

    assert not together.broken


def test_an_error_is_raised_wherever_somebody_waits_and_stays(
    fake: Callable[..., FakeDevice],
) -> None:
    device = fake(fails=lambda n: OSError("lost") if n == 1 else None)
    to, source, stream = device.memory(N), filled(device, 1), device.stream()
    stream.copy(to, source)
    fine = stream.record()
    fine.wait()
    stream.copy(to, source)
    behind = stream.record()

    for wait in (behind.wait, stream.synchronise, behind.wait):
        with pytest.raises(OSError, match="lost"):
            wait()
    device.synchronise()  # is about what is under way, and nothing is any more

    other = device.stream()
    other.copy(to, source)
    other.synchronise()  # another stream is none the worse


def test_closing_ends_a_long_wait_of_somebody_else(fake: Callable[..., FakeDevice]) -> None:
    device = fake(pace=Pace(1))  # an hour for one copy
    stream, raised, waits = device.stream(), [], Event()
    stream.copy(device.memory(N), filled(device, 1))

    def wait() -> None:
        waits.set()
        try:
            stream.synchronise()
        except RuntimeError as error:
            raised.append(str(error))

    thread = Thread(target=wait)
    thread.start()
    assert waits.wait(30)
    stream.close()
    stream.close()
    thread.join(30)

    assert raised in ([], ["the stream was closed while somebody waited for it"])
    assert not thread.is_alive()
    assert not [t for t in threading.enumerate() if t.name.startswith("moetier fake")]


def test_closing_the_device_takes_everything_back() -> None:
    device = FakeDevice(device_bytes=2 * N, pinned_bytes=2 * N)
    device.memory(N)
    device.pinned(N)
    device.stream()
    device.close()
    device.close()

    assert (device.lent, device.free(), device.free_pinned()) == (0, 2 * N, 2 * N)
    assert not [t for t in threading.enumerate() if t.name.startswith("moetier fake")]


def test_the_made_up_counter_runs_at_its_watts(fake: Callable[..., FakeDevice]) -> None:
    device = fake(counts_energy=True)
    begin, before, counted = perf_counter_ns(), device.energy(), perf_counter_ns()
    while perf_counter_ns() < counted + 2_000_000:
        pass
    after, end = device.energy(), perf_counter_ns()

    assert before is not None
    assert after is not None
    assert 2_000_000 * WATTS // 1000 - 1 <= after - before <= (end - begin) * WATTS // 1000 + 1
    assert fake().energy() is None


def test_compute_runs_where_it_is_called(fake: Callable[..., FakeDevice]) -> None:
    stream = fake().stream()
    with stream.running():
        value = torch.ones(3).sum()
    done = stream.record()

    assert done.done()
    assert float(value) == 3
