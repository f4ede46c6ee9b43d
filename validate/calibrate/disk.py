"""This module is the disk machine as calibration sees it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryDirectory
from typing import Any

import torch

from moetier.sim.policy.base import Precision
from moetier.sim.run import Result, Setting, simulate
from moetier.sim.units import format_rate
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.traces.synthetic import Synthetic
from moetier.validate.calibrate.device import Memory
from moetier.validate.calibrate.micro import RealDevice
from moetier.validate.calibrate.power import energy_uj
from moetier.validate.calibrate.scratch import Pieces, scratch_file
from moetier.validate.calibrate.ways import ways, whole
from moetier.validate.compare.observe import Around, Case, Run
from moetier.validate.identity import DISK, identity
from moetier.validate.machines.dense import Dense
from moetier.validate.machines.direct import DirectFile, aligned
from moetier.validate.machines.experts import RandomHidden, WholeKernel
from moetier.validate.machines.lanes import LaneSet
from moetier.validate.machines.pacing import Pace
from moetier.validate.machines.run import disk_machine, pack_synthetic
from moetier.validate.machines.slots import SlotPool, free_memory

FILE_BYTES = 1 << 30
LATE = 0.1  # share of paced bytes that may come late


class DiskDevice(RealDevice):
    """Reads pieces of a scratch file and computes with random weights."""

    energy_window = 100_000_000  # RAPL counts every millisecond

    def __init__(
        self,
        geometry: Geometry,
        weights: str,
        file: DirectFile,
        *,
        lanes: int,
        pace: Pace | None,
        threads: int,
        precisions: Sequence[Precision] = (),
    ) -> None:
        """Make the weights: of whole experts, and of those that *precisions* store.

        Raises:
            InputError: If no kernel computes *weights*, sizes are unknown, or memory is short.
        """
        folder = file.path.parent.parent
        self._pace, self._file = pace, file
        kernel = WholeKernel(geometry, weights)
        found = whole(kernel)
        for precision in precisions:
            found |= ways(precision, geometry, weights)
        self.identity = identity(DISK, folder) | {
            "threads": str(threads), "format": weights, "machine": "disk",
        }  # fmt: skip
        self._tiers = (
            Memory("dram", free_memory() or FILE_BYTES, "memory that was free"),
            Memory("disk", disk_usage(folder).total, f"the file system of {folder.resolve()}"),
        )
        super().__init__(
            geometry,
            weights,
            found,
            lambda work, cut: Dense(work, cut, weights),
            RandomHidden(geometry.hidden or 0, kernel.dtype),
            lanes=lanes,
            threads=threads,
        )

    @property
    def tiers(self) -> tuple[Memory, Memory]:
        """The memory and the disk."""
        return self._tiers

    def energy(self) -> int | None:
        """Return what the processor's counter says."""
        return energy_uj()

    def remarks(self) -> Sequence[str]:
        """Return how the file was read; refuse a pace that the disk did not keep."""
        self.close()
        found = [f"by {self._file.how}"]
        if self._pace is not None:
            rate = format_rate(self._pace.rate)
            late = self._overdue / max(self._served, 1)
            if late > LATE:
                raise InputError(
                    f"the disk does not keep {rate} on each of {self.lanes} lanes: {late:.1%} of "
                    "the bytes came late",
                    where="pace",
                    way_out="give a lower --pace, or fewer --lanes",
                )
            found.append(f"each lane held to {rate}; {late:.1%} of the bytes came late")
        return found

    def _settle(self) -> None:
        """Return at once: a CPU computes when it is told to."""

    def _pieces(self, nbytes: int) -> int:
        return len(Pieces(self._file, nbytes).nbytes)

    def _open_lanes(self, nbytes: int, lanes: int, room: int) -> LaneSet:
        slots = SlotPool(room * aligned(nbytes))
        return LaneSet(Pieces(self._file, nbytes), lanes, self._pace, slots=slots)

    @contextmanager
    def _tiny_runs(self, source: Synthetic, setting: Setting) -> Iterator[Run]:
        with TemporaryDirectory(dir=self._file.path.parent) as inside:
            path = Path(inside) / "tiny"
            pack_synthetic(path, source, setting)
            with disk_machine(path, threads=self._threads) as machines:

                def run(case: Case, around: Around, **observers: Any) -> Result:
                    return simulate(
                        case.source, case.setting, machine=around(machines), **observers
                    )

                yield run


@contextmanager
def disk_device(
    geometry: Geometry,
    weights: str,
    folder: Path,
    *,
    lanes: int = 1,
    pace: Pace | None = None,
    threads: int = 1,
    precisions: Sequence[Precision] = (),
    file_bytes: int = FILE_BYTES,
) -> Iterator[DiskDevice]:
    """Yield a disk as a device; at the end its file and threads are gone.

    Beside whole experts in the format *weights*, those that *precisions* store are timed.

    Raises:
        InputError: If *folder* or memory do not suffice, or the model cannot be computed.
    """
    before = torch.get_num_threads()
    with scratch_file(folder, file_bytes) as file:
        torch.set_num_threads(threads)
        device = None
        try:
            device = DiskDevice(
                geometry,
                weights,
                file,
                lanes=lanes,
                pace=pace,
                threads=threads,
                precisions=precisions,
            )
            yield device
        finally:
            torch.set_num_threads(before)
            if device is not None:
                device.close()
