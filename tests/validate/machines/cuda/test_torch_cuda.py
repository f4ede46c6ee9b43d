"""What `TorchCuda` keeps account of, with stand-ins for what torch calls the driver for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moetier.traces.errors import InputError
from moetier.validate.machines.cuda import torch_cuda
from moetier.validate.machines.cuda.torch_cuda import HELD_BACK, LEFT_TO_HOST, TorchCuda

GIB = 1 << 30


class Runtime:
    """Registers memory, and remembers it."""

    cudaError = SimpleNamespace(success="ok")

    def __init__(self) -> None:
        """Let all succeed."""
        self.registered: dict[int, int] = {}
        self.status = "ok"

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> str:
        """Remember *address*."""
        if self.status == "ok":
            self.registered[address] = nbytes
        return self.status

    def cudaHostUnregister(self, address: int) -> str:
        """Forget *address*, which must be known."""
        del self.registered[address]
        return "ok"


class FakeStream:
    """A stream that has always done what it was given."""

    made = 0

    def __init__(self, device: torch.device) -> None:
        """Count."""
        FakeStream.made += 1

    def __enter__(self) -> None:
        """Become the current stream."""

    def __exit__(self, *_: object) -> None:
        """Be it no longer."""

    def synchronize(self) -> None:
        """Return at once."""


class FakeEvent:
    """An event of a stream, half a millisecond after the one before it."""

    made = 0

    def __init__(self, enable_timing: bool) -> None:
        """Count."""
        assert enable_timing  # or there is no time to ask for
        FakeEvent.made += 1
        self.at = FakeEvent.made / 2
        self.recorded: list[Any] = []

    def record(self, stream: FakeStream) -> None:
        """Remember *stream*."""
        self.recorded.append(stream)

    def query(self) -> bool:
        """Be reached once recorded."""
        return bool(self.recorded)

    def synchronize(self) -> None:
        """Return at once."""

    def elapsed_time(self, later: FakeEvent) -> float:
        """Return milliseconds."""
        return later.at - self.at


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """A machine with one GPU of 10 GiB, 4 of them free, and a runtime that is not there."""
    found = Runtime()
    FakeStream.made = 0
    nothing: Any = lambda *_: None  # noqa: E731
    stand_ins = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_name": lambda _=0: "Imaginary 1000",
        "get_device_properties": lambda _: SimpleNamespace(uuid="0ddba11"),
        "mem_get_info": lambda _: (4 * GIB, 10 * GIB),
        "memory_reserved": lambda _: 3 * GIB,
        "memory_allocated": lambda _: 2 * GIB,
        "synchronize": nothing,
        "empty_cache": nothing,
        "cudart": lambda: found,
        "Stream": FakeStream,
        "Event": FakeEvent,
        "stream": lambda stream: stream,
        "device": lambda _: torch.no_grad(),
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch_cuda, "free_memory", lambda: LEFT_TO_HOST + (1 << 20))
    return found


def test_pinned_memory_is_registered_in_whole_pages_and_let_go_of(runtime: Runtime) -> None:
    device = TorchCuda()
    one, two = device.pinned(5000), device.pinned(4096)

    assert (one.numel(), two.numel()) == (5000, 4096)
    assert runtime.registered == {one.data_ptr(): 8192, two.data_ptr(): 4096}

    device.release(one)

    assert list(runtime.registered) == [two.data_ptr()]

    device.close()
    device.close()

    assert runtime.registered == {}


def test_a_host_that_has_not_the_memory_is_asked_for_none(runtime: Runtime) -> None:
    device = TorchCuda()
    with pytest.raises(InputError, match=r"\(1048577 bytes\) are needed on the host, and 1 MiB"):
        device.pinned((1 << 20) + 1)

    assert runtime.registered == {}


def test_memory_that_cannot_be_pinned_names_the_bytes(runtime: Runtime) -> None:
    runtime.status = "cudaErrorMemoryAllocation"
    with pytest.raises(InputError, match=r"5000 bytes of memory cannot be pinned \(cudaErrorMem"):
        TorchCuda().pinned(5000)


def test_what_torch_keeps_for_later_counts_as_free(runtime: Runtime) -> None:
    assert TorchCuda().free() == 4 * GIB + GIB - HELD_BACK


def test_a_device_that_is_full_names_the_bytes(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **given: Any) -> None:
        raise torch.cuda.OutOfMemoryError("no")

    monkeypatch.setattr(torch, "empty", full)
    for wanted in (5 * GIB, GIB):  # also where as much is free, but in pieces
        with pytest.raises(InputError, match=rf"\({wanted} bytes\) are needed on the device"):
            TorchCuda().memory(wanted)


def test_streams_in_use_are_never_the_same_and_closed_ones_are_used_again(
    runtime: Runtime,
) -> None:
    device = TorchCuda()
    first = device.stream()
    for _ in range(100):
        other = device.stream()
        other.close()
        other.close()

    assert FakeStream.made == 2

    both = device.stream(), device.stream()
    inside = {id(stream._stream) for stream in (first, *both)}  # type: ignore[attr-defined]

    assert len(inside) == 3


def test_a_gpu_is_named_in_the_identity(runtime: Runtime) -> None:
    found = TorchCuda().identity()

    assert found["gpu"] == "Imaginary 1000"
    assert not {"file system", "device", "threads"} & set(found)


@pytest.mark.parametrize(("index", "which"), [(1, "CUDA device 1"), (7, "CUDA device 7")])
def test_a_gpu_that_is_not_there_is_refused(index: int, which: str, runtime: Runtime) -> None:
    with pytest.raises(InputError, match=f"sees no {which}; use the disk machine, or"):
        TorchCuda(index)


def test_copies_compute_and_events_go_to_the_stream(runtime: Runtime) -> None:
    device = TorchCuda()
    stream = device.stream()
    there, here = torch.zeros(4, dtype=torch.uint8), torch.ones(4, dtype=torch.uint8)
    begin = stream.record()
    stream.copy(there, here)
    end = stream.record()
    with stream.running():
        pass
    stream.synchronise()
    end.wait()

    assert there.tolist() == [1] * 4
    assert begin.done()
    assert end.since(begin) == 500_000  # ns

    there.zero_()
    stream.copy_back(here, there)
    device.synchronise()
    stream.close()

    assert here.tolist() == [0] * 4


def test_open_cuda_is_the_first_gpu(runtime: Runtime) -> None:
    device = torch_cuda.open_cuda()

    assert (device.name, device.torch) == ("Imaginary 1000", torch.device("cuda", 0))
    assert device.energy() is None  # no such GPU for NVML
    device.close()
