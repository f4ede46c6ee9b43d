"""This module holds the slices of a run in pinned host memory, and copies them to a device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock, local
from typing import Protocol

import torch
from torch import Tensor

from moetier.sim.layout import Layout
from moetier.sim.units import format_bytes
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.validate.closing import Closing
from moetier.validate.machines.cuda.device import Device, Stream, require
from moetier.validate.machines.direct import aligned
from moetier.validate.machines.random_weights import Bytes
from moetier.validate.machines.slices_file import OnProgress
from moetier.validate.machines.slots import Slot, SlotPool

Content = Callable[[int], Bytes]
"""From a slice to its bytes."""


class HostSlices(Closing):
    """All slices of a run in pinned memory, a block per layer; use it as a context manager."""

    def __init__(
        self,
        device: Device,
        layout: Layout,
        content: Content,
        *,
        geometry: Geometry,
        weights: str,
        source: str,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Pin memory for every slice of *layout*, and fill it with *content*, by several threads.

        *geometry* is the model, *weights* the format of its experts, *source* where the bytes come
        from, in a word; *on_progress* hears of every layer.

        Raises:
            InputError: If the host has not as much memory to pin; none is held then.
        """
        self.nbytes, self.geometry, self.weights, self.source = (
            layout.nbytes, geometry, weights, source,
        )  # fmt: skip
        self._device, self._n_parts, self._each = device, layout.n_parts, layout.layer_slices
        self._blocks: list[Tensor] = []
        self._offsets: list[int] = []
        total = host_bytes(layout)
        require(total, device.free_pinned(), "expert weights", "the host")
        try:
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                for layer in range(layout.n_layers):
                    self._fill(layer, content, threads)
                    if on_progress is not None:
                        on_progress(sum(block.numel() for block in self._blocks), total)
        except BaseException:
            self.close()
            raise

    def data(self, slice_id: int) -> Tensor:
        """Return a slice where it lies, (nbytes,) uint8."""
        begin = self._offsets[slice_id]
        return self._blocks[slice_id // self._each][begin : begin + self.nbytes[slice_id]]

    def check_layout(self, layout: Layout) -> None:
        """Raise `InputError` unless these are exactly the slices of *layout*."""
        if layout.nbytes != self.nbytes or layout.n_parts != self._n_parts:
            raise InputError(
                f"{len(self.nbytes)} slices of {format_bytes(sum(self.nbytes))} are in pinned "
                f"memory, and the run has {len(layout.nbytes)} of "
                f"{format_bytes(layout.total_bytes)}",
                where="experts",
                way_out="pin the slices of this model, format and precision",
            )

    def close(self) -> None:
        """Give the memory back; closing twice does nothing."""
        for block in self._blocks:
            self._device.release(block)
        self._blocks.clear()

    def _fill(self, layer: int, content: Content, threads: ThreadPoolExecutor) -> None:
        mine = range(layer * self._each, (layer + 1) * self._each)
        end = 0
        for s in mine:
            self._offsets.append(end)
            end += aligned(self.nbytes[s])
        self._blocks.append(self._device.pinned(end))

        def write(slice_id: int) -> None:
            made = torch.from_numpy(content(slice_id))
            self.data(slice_id).copy_(made)

        for _ in threads.map(write, mine):
            pass


class Held(Protocol):
    """Slices in pinned memory."""

    @property
    def nbytes(self) -> Sequence[int]:
        """The bytes of each."""
        ...

    def data(self, slice_id: int) -> Tensor:
        """Return a slice where it lies, (nbytes,) uint8."""
        ...


class DeviceReader:
    """Copies slices for the lanes of one machine: each thread that reads has a stream of its own.

    A read returns when its copy is done, so that order, promotion and what is never stopped are the
    lanes' word. Close it when the lanes have ended.
    """

    def __init__(self, host: Held, device: Device, threads: int) -> None:
        """Make streams for as many *threads* as will read."""
        self.nbytes = host.nbytes
        self._host = host
        self._streams = [device.stream() for _ in range(threads)]
        self._left: Iterator[Stream] = iter(self._streams)
        self._mine = local()
        self._lock = Lock()

    def read(self, slice_id: int, slot: Slot) -> None:
        """Copy a slice into *slot*, which is on the device; raises what the copy failed with."""
        stream = self._stream()
        stream.copy(slot.memory[: slot.nbytes], self._host.data(slice_id))
        stream.record().wait()

    def close(self) -> None:
        """End the streams; closing twice does nothing."""
        for stream in self._streams:
            stream.close()

    def _stream(self) -> Stream:
        found: Stream | None = getattr(self._mine, "stream", None)
        if found is None:
            with self._lock:
                found = self._mine.stream = next(self._left)
        return found


class DeviceStore(DeviceReader):
    """All slices of a run, as a `Store`."""

    def __init__(self, host: HostSlices, device: Device, threads: int) -> None:
        """Copy from *host*; see `DeviceReader`."""
        super().__init__(host, device, threads)
        self._device = device
        self.check_layout = host.check_layout

    def read_aside(self, slice_id: int) -> Slot:
        """Return a slice in memory of its own on the device."""
        data = self._host.data(slice_id)
        return Slot(data.to(self._device.torch, copy=True), data.numel())


class DeviceSlots(SlotPool):
    """Slots in memory of a device, all given back when it is closed."""

    def __init__(self, limit: int, device: Device) -> None:
        """Begin with nothing.

        Raises:
            InputError: If *device* does not have *limit* bytes free.
        """
        self._device = device
        self._made: dict[int, Tensor] = {}  # by address
        super().__init__(limit)

    def close(self) -> None:
        """Give all memory back, lent or idle."""
        super().close()
        for memory in self._made.values():
            self._device.release(memory)
        self._made.clear()

    def _check(self, limit: int) -> None:
        require(limit, self._device.free(), "slots")

    def _new(self, size: int) -> Tensor:
        memory = self._device.memory(size)
        self._made[memory.data_ptr()] = memory
        return memory

    def _drop(self, memory: Tensor) -> None:
        self._device.release(self._made.pop(memory.data_ptr()))


def host_bytes(layout: Layout) -> int:
    """Return the pinned memory that the slices of *layout* take, each on pages of its own."""
    return sum(map(aligned, layout.nbytes))
