"""This module is a GPU as torch sees it: the only one that knows CUDA.

Pinned memory is mapped pages that are registered with the driver. torch's own pinned memory rounds
each piece up to a power of two, which for all experts of a model is tens of gigabytes of nothing.
"""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from moetier.traces.errors import InputError
from moetier.validate.identity import identity
from moetier.validate.machines.cuda.device import FACTS, Device, Event, Stream, require
from moetier.validate.machines.cuda.nvml import Counter
from moetier.validate.machines.direct import page_memory
from moetier.validate.machines.slots import free_memory

HELD_BACK = 1 << 30  # bytes of the device, for what torch and the driver need themselves
LEFT_TO_HOST = 4 << 30  # bytes that are never pinned: a system without any comes to a halt


class TorchCuda:
    """CUDA device *index* of this machine; close it after use."""

    energy_window = 1_000_000_000  # the counter moves every 20 to 100 ms

    def __init__(self, index: int = 0) -> None:
        """Open the device.

        Raises:
            InputError: If torch sees none.
        """
        require_cuda(index)
        self.torch = torch.device("cuda", index)
        self.name: str = torch.cuda.get_device_name(index)
        self._counter = Counter(str(getattr(torch.cuda.get_device_properties(index), "uuid", "")))
        self._pinned: dict[int, mmap.mmap] = {}  # by address
        # torch has 32 streams and deals them out again and again, so that two that are in use could
        # be one, whose copies wait for its matmuls; those that are closed are used again instead
        self._idle: list[Any] = []
        self._lock = Lock()

    def identity(self) -> Mapping[str, str]:
        """Return what this machine and its GPU say of themselves, the link included."""
        found = identity(FACTS) | {"gpu": self.name}
        link = self._counter.link()
        return found if link is None else found | {"pcie": link}

    def memory(self, nbytes: int) -> Tensor:
        """Return memory of the device; see `Device`."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch)
        except torch.cuda.OutOfMemoryError:
            require(nbytes, min(self.free(), nbytes - 1), self.name)
            raise

    def pinned(self, nbytes: int) -> Tensor:
        """Return registered memory of the host; see `Device`."""
        require(nbytes, self.free_pinned(), "pinned memory", "the host")
        pages = page_memory(nbytes)
        found = torch.frombuffer(pages, dtype=torch.uint8, count=nbytes)
        runtime = _cudart()
        with torch.cuda.device(self.torch):
            status = runtime.cudaHostRegister(found.data_ptr(), len(pages), 0)
        if status != runtime.cudaError.success:
            raise InputError(
                f"{nbytes} bytes of memory cannot be pinned ({status})",
                where=self.name,
                way_out="use fewer layers, or lift the limit on locked memory",
            )
        with self._lock:
            self._pinned[found.data_ptr()] = pages
        return found

    def release(self, memory: Tensor) -> None:
        """Let go of *memory*; torch has that of the device back when the last view is gone."""
        if memory.device.type != "cpu":
            return
        with self._lock:
            there = self._pinned.pop(memory.data_ptr(), None)
        if there is not None:
            _cudart().cudaHostUnregister(memory.data_ptr())

    def free(self) -> int:
        """Return the bytes that can be had, those that torch keeps for later included."""
        left, _ = torch.cuda.mem_get_info(self.torch)
        kept = torch.cuda.memory_reserved(self.torch) - torch.cuda.memory_allocated(self.torch)
        return max(int(left) + int(kept) - HELD_BACK, 0)

    def free_pinned(self) -> int | None:
        """Return the bytes of the host that can be pinned."""
        left = free_memory()
        return None if left is None else max(left - LEFT_TO_HOST, 0)

    def stream(self) -> Stream:
        """Return a new stream."""
        with self._lock:
            made = self._idle.pop() if self._idle else _made(torch.cuda.Stream, self.torch)
        return _Stream(made, self._idle)

    def energy(self) -> int | None:
        """Return what the driver's counter says, in microjoules."""
        return self._counter.energy()

    def synchronise(self) -> None:
        """Wait for the whole device."""
        torch.cuda.synchronize(self.torch)

    def close(self) -> None:
        """Give all memory back."""
        with self._lock:
            addresses = list(self._pinned)
            torch.cuda.synchronize(self.torch)
            for address in addresses:
                _cudart().cudaHostUnregister(address)
            self._pinned.clear()
        gc.collect()
        torch.cuda.empty_cache()
        self._counter.close()


class _Event:
    def __init__(self, stream: Any) -> None:
        self._event: Any = _made(torch.cuda.Event, enable_timing=True)
        self._event.record(stream)

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def since(self, earlier: Event) -> int:
        assert isinstance(earlier, _Event)
        ms: float = earlier._event.elapsed_time(self._event)
        return round(ms * 1e6)


class _Stream:
    def __init__(self, stream: Any, idle: list[Any]) -> None:
        self._stream, self._idle, self._open = stream, idle, True

    def copy(self, to: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)

    copy_back = copy

    def record(self) -> Event:
        return _Event(self._stream)

    @contextmanager
    def running(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield

    def synchronise(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        if self._open:
            self._open = False
            self._stream.synchronize()
            self._idle.append(self._stream)


def open_cuda() -> Device:
    """Return the first CUDA device; raises as `TorchCuda` does."""
    return TorchCuda()


def require_cuda(index: int = 0) -> None:
    """Raise `InputError` unless torch sees CUDA device *index*."""
    if index >= (torch.cuda.device_count() if torch.cuda.is_available() else 0):
        raise InputError(
            f"torch {torch.__version__} sees no CUDA device{f' {index}' if index else ''}",
            where="machine",
            way_out="use the disk machine, or a machine with a GPU and torch built for CUDA",
        )


def _made(what: Any, *given: Any, **more: Any) -> Any:
    return what(*given, **more)  # torch has no types for these


def _cudart() -> Any:
    return _made(torch.cuda.cudart)
