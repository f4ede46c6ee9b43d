"""This module is the CUDA machine as calibration sees it, on any of its devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from moetier.sim.policy.base import Precision
from moetier.sim.run import Setting
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.traces.synthetic import Synthetic
from moetier.validate.calibrate.device import Memory
from moetier.validate.calibrate.micro import WAVES, RealDevice
from moetier.validate.calibrate.ways import Place, ways, whole
from moetier.validate.compare.observe import Around, Case, Run
from moetier.validate.machines.cuda.device import Device, require
from moetier.validate.machines.cuda.host import DeviceReader, DeviceSlots
from moetier.validate.machines.cuda.kernel import refuse_channels
from moetier.validate.machines.cuda.run import CudaResult, CudaRuns
from moetier.validate.machines.cuda.torch_cuda import open_cuda
from moetier.validate.machines.dense import Dense
from moetier.validate.machines.direct import aligned
from moetier.validate.machines.experts import RandomHidden, WholeKernel
from moetier.validate.machines.lanes import LaneSet
from moetier.validate.machines.random_weights import Bytes
from moetier.validate.machines.slots import Slot

PINNED_BYTES = 1 << 30
FAST, SLOW = TIERS = ("hbm", "dram")


class Pieces:
    """Pinned memory as pieces of one size, each on pages of its own."""

    def __init__(self, memory: Tensor, nbytes: int) -> None:
        """Cut *memory* into pieces of *nbytes*."""
        self._memory, self._step = memory, aligned(nbytes)
        self.nbytes: Sequence[int] = [nbytes] * (memory.numel() // self._step)

    def data(self, slice_id: int) -> Tensor:
        """Return a piece where it lies, (nbytes,) uint8."""
        begin = slice_id * self._step
        return self._memory[begin : begin + self.nbytes[slice_id]]


class CudaLanes(LaneSet):
    """Lanes that copy pieces to a device; all they hold is given back when they are closed."""

    def __init__(self, pieces: Pieces, device: Device, lanes: int, room: int) -> None:
        """Start *lanes* lanes, with slots for *room* pieces."""
        limit = room * aligned(pieces.nbytes[0])
        self._pool = DeviceSlots(limit, device)
        self._copier = DeviceReader(pieces, device, lanes)
        try:
            self._pool.reserve(pieces.nbytes[0], room)
            super().__init__(self._copier, lanes, slots=self._pool)
        except BaseException:
            self._copier.close()
            self._pool.close()
            raise

    def close(self) -> None:
        """End all threads and streams."""
        super().close()
        self._copier.close()
        self._pool.close()


class CudaDevice(RealDevice):
    """Copies pieces of pinned memory and computes with random weights."""

    writes_back = True

    def __init__(
        self,
        geometry: Geometry,
        weights: str,
        device: Device,
        *,
        lanes: int,
        precisions: Sequence[Precision] = (),
        pinned_bytes: int = PINNED_BYTES,
    ) -> None:
        """Make the weights: of whole experts, and of those that *precisions* store.

        Raises:
            InputError: If no kernel computes *weights* on a device, or memory is short.
        """
        kernel = WholeKernel(geometry, weights)
        self._device = device
        self._tiers = (
            Memory(FAST, max(device.free() or 1, 1), "memory of the device that was free"),
            Memory(SLOW, max(device.free_pinned() or 1, 1), "memory that was free to be pinned"),
        )
        self.energy_window = device.energy_window
        self.identity = {**device.identity(), "format": weights, "machine": "cuda"}
        self._held = DeviceSlots(0, device)  # of the ways, which are never given back in between
        self._stream = device.stream()
        self._pinned: Tensor | None = None
        place = Place(device.torch, self._put)
        try:
            found = whole(kernel, place)
            for precision in precisions:
                refuse_channels(precision)
                found |= ways(precision, geometry, weights, place)
            self._pinned = device.pinned(pinned_bytes)
            super().__init__(
                geometry,
                weights,
                found,
                lambda work, cut: Dense(
                    work,
                    cut,
                    weights,
                    device=device.torch,
                    require=lambda nbytes, what: require(nbytes, device.free(), what),
                ),
                RandomHidden(geometry.hidden or 0, kernel.dtype, device=device.torch),
                lanes=lanes,
                threads=torch.get_num_threads(),
            )
        except BaseException:
            self.let_go()
            raise

    def copy_back(self, nbytes: int, lanes: int) -> int:
        """Copy from the device to pinned memory; return ns per piece and lane."""
        pieces = self._cut(nbytes)
        slots = [self._held_for_a_while(nbytes) for _ in range(lanes)]
        streams = [self._device.stream() for _ in range(lanes)]
        try:
            begin = perf_counter_ns()
            for wave in range(WAVES):
                for lane, stream in enumerate(streams):
                    piece = pieces.data((wave * lanes + lane) % len(pieces.nbytes))
                    stream.copy_back(piece, slots[lane].memory[:nbytes])
            for stream in streams:
                stream.synchronise()
            return (perf_counter_ns() - begin) // WAVES
        finally:
            for stream in streams:
                stream.close()
            for slot in slots:
                self._held.give(slot)

    @property
    def tiers(self) -> tuple[Memory, Memory]:
        """The device's memory and the host's."""
        return self._tiers

    def energy(self) -> int | None:
        """Return what the device's counter says."""
        return self._device.energy()

    def remarks(self) -> Sequence[str]:
        """Return how copies were made."""
        return [f"from pinned memory to {self._device.name}, a stream per lane"]

    def let_go(self) -> None:
        """Give all memory back; the lanes must be closed."""
        self._stream.close()
        self._held.close()
        if self._pinned is not None:
            self._device.release(self._pinned)
            self._pinned = None

    def _held_for_a_while(self, nbytes: int) -> Slot:
        self._held.limit += aligned(nbytes)
        return self._held.take(nbytes)

    def _put(self, data: Bytes) -> Slot:
        slot = self._held_for_a_while(len(data))
        slot.memory[: len(data)].copy_(torch.from_numpy(data))
        return slot

    def _computes(self) -> AbstractContextManager[None]:
        return self._stream.running()

    def _settle(self) -> None:
        self._stream.synchronise()

    def _pieces(self, nbytes: int) -> int:
        return len(self._cut(nbytes).nbytes)

    def _cut(self, nbytes: int) -> Pieces:
        assert self._pinned is not None
        return Pieces(self._pinned, nbytes)

    def _open_lanes(self, nbytes: int, lanes: int, room: int) -> LaneSet:
        return CudaLanes(self._cut(nbytes), self._device, lanes, room)

    @contextmanager
    def _tiny_runs(self, source: Synthetic, setting: Setting) -> Iterator[Run]:
        with CudaRuns(self._device, lanes=self.lanes) as runs:

            def run(case: Case, around: Around, **observers: Any) -> CudaResult:
                return runs.run(case.source, case.setting, around=around, **observers)

            yield run


@contextmanager
def cuda_device(
    geometry: Geometry,
    weights: str,
    *,
    device: Device | None = None,
    lanes: int = 2,
    pace: object = None,
    threads: int = 1,
    precisions: Sequence[Precision] = (),
    pinned_bytes: int = PINNED_BYTES,
) -> Iterator[CudaDevice]:
    """Yield a GPU as calibration sees it; at the end its memory is given back.

    *device* is by default the first CUDA device; one that is given stays the caller's to close.
    Beside whole experts in the format *weights*, those that *precisions* store are timed. torch
    computes on the device, so *threads* change nothing.

    Raises:
        InputError: If there is no GPU, memory does not suffice, or a *pace* is asked for.
    """
    refuse_pace(pace)
    with ExitStack() as stack:
        if device is None:
            device = stack.enter_context(closing(open_cuda()))
        found = CudaDevice(
            geometry,
            weights,
            device,
            lanes=lanes,
            precisions=precisions,
            pinned_bytes=pinned_bytes,
        )
        stack.callback(found.let_go)
        stack.callback(found.close)
        yield found


def refuse_pace(pace: object) -> None:
    """Raise `InputError` unless *pace* is None."""
    if pace is not None:
        raise InputError(
            "copies to a GPU are not held to a pace",
            where="pace",
            way_out="leave it out, or use the disk machine",
        )
