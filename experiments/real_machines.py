"""This module gives the comparison with reality the machines it may run on, by one set of words."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING, Any, Protocol

from moetier.sim.memory import extent_of
from moetier.sim.policy.compose import compose
from moetier.sim.run import Result, Stage, set_up
from moetier.traces.schema import Header
from moetier.validate.calibrate.cuda import PINNED_BYTES, refuse_pace
from moetier.validate.calibrate.cuda import TIERS as CUDA_TIERS
from moetier.validate.machines import run as disk
from moetier.validate.machines.cuda.fit import Need, layers_that_fit, need_of
from moetier.validate.machines.cuda.run import CudaRuns
from moetier.validate.machines.cuda.torch_cuda import open_cuda
from moetier.validate.machines.slots import free_memory

if TYPE_CHECKING:
    from moetier.sim.policy.base import Precision
    from moetier.validate.compare.observe import Case
    from moetier.validate.machines.cuda.device import Device
    from moetier.validate.machines.pacing import Pace

Open = Callable[[str], Any]
"""Opens a progress bar, by its title."""


class RealMachine(Protocol):
    """A machine to compare with, ready to be calibrated and to run cases."""

    @property
    def tiers(self) -> tuple[str, str]:
        """The tier that computes, and the one below it."""
        ...

    @property
    def facts(self) -> Mapping[str, str]:
        """What it knows of its identity better than the system does."""
        ...

    @property
    def calibration(self) -> Mapping[str, Any]:
        """The arguments with which `calibrate` measures it."""
        ...

    def capacities(self) -> dict[str, int | None]:
        """Return the bytes of each tier, the faster first; None where nobody knows."""
        ...

    def layers(self, cases: Sequence[Case]) -> int:
        """Return how many MoE layers of the cases' model fit.

        Raises:
            InputError: If not even one does.
        """
        ...

    def prepare(self, cases: Sequence[Case], bar: Open) -> None:
        """Store the experts of all *cases* where runs take them from."""
        ...

    def run(self, case: Case, around: Any, **observers: Any) -> Result:
        """Run *case*: a `compare.observe.Run`."""
        ...


class Disk:
    """The disk machine, with expert files in *folder*."""

    tiers = ("dram", "disk")

    def __init__(self, folder: Path, *, lanes: int, pace: Pace | None, threads: int) -> None:
        """Read by *lanes* threads held to *pace*, and compute by *threads*."""
        self.facts = {"threads": str(threads)}
        self.calibration: dict[str, Any] = {"lanes": lanes, "pace": pace, "threads": threads}
        self._folder = folder
        self._files: dict[str, Path] = {}

    def capacities(self) -> dict[str, int | None]:
        """Return what is free of memory, and the size of the file system."""
        fast, slow = self.tiers
        return {fast: free_memory(), slow: disk_usage(self._folder).total}

    def layers(self, cases: Sequence[Case]) -> int:
        """Return all of them: packing says what the disk has no room for."""
        return cases[0].source.header.geometry.n_moe_layers

    def prepare(self, cases: Sequence[Case], bar: Open) -> None:
        """Write a file of slices for every layout that the cases need."""
        with bar("pack") as progress:
            for case in cases:
                key = self._key(case)
                if key not in self._files:
                    self._files[key] = self._folder / f"{len(self._files)}.slices"
                    disk.pack_synthetic(
                        self._files[key], case.source, case.setting, on_progress=progress
                    )

    def run(self, case: Case, around: Any, **observers: Any) -> Result:
        """Run *case* on its file."""
        return disk.run_on_disk(
            case.source,
            case.setting,
            self._files[self._key(case)],
            around=around,
            popularity=case.popularity,
            **self.calibration,
            **observers,
        )

    def _key(self, case: Case) -> str:
        return layout_key(compose(case.setting.policy, self.tiers[:1]).precision)


class Cuda:
    """The CUDA machine on *device*."""

    tiers = CUDA_TIERS

    def __init__(self, device: Device, runs: CudaRuns, lanes: int) -> None:
        """Copy on *lanes* streams, with what *runs* keeps."""
        identity = device.identity()
        self.facts = {name: value for name, value in identity.items() if name != "date"}
        self.calibration = {"lanes": lanes, "device": device}
        self._device, self._runs, self._lanes = device, runs, lanes

    def capacities(self) -> dict[str, int | None]:
        """Return what is free on the device, and what can be pinned."""
        fast, slow = self.tiers
        return {fast: self._device.free(), slow: self._device.free_pinned()}

    def layers(self, cases: Sequence[Case]) -> int:
        """Return how many fit into pinned memory and onto the device; see `RealMachine`."""
        whole = cases[0].source.header.geometry.n_moe_layers
        pinned = self._device.free_pinned()
        if pinned is not None:
            pinned = max(pinned - PINNED_BYTES, 0)  # calibration pins as much beside it
        extents = [extent_of(case.source) for case in cases]

        def need(count: int) -> Need:
            stages: list[Stage] = [
                set_up(_cut(case.source.header, count), case.setting, extent)
                for case, extent in zip(cases, extents, strict=True)
            ]
            return need_of(stages, self._lanes)

        return layers_that_fit(whole, need, pinned, self._device.free())

    def prepare(self, cases: Sequence[Case], bar: Open) -> None:
        """Pin the slices of every layout that the cases need, and run one case for nothing.

        A device loads its code when it is first used, which would be in the first case's time.
        """
        with bar("pin") as progress:
            for case in cases:
                header = case.source.header
                stage = set_up(header, case.setting, extent_of(case.source))
                self._runs.pin(header.geometry, stage, progress)
        first = cases[0]
        self._runs.run(first.source, first.setting, popularity=first.popularity)

    def run(self, case: Case, around: Any, **observers: Any) -> Result:
        """Run *case* on the device."""
        return self._runs.run(
            case.source, case.setting, around=around, popularity=case.popularity, **observers
        )


@contextmanager
def open_machine(
    kind: str,
    folder: Path,
    *,
    lanes: int,
    pace: Pace | None = None,
    threads: int = 1,
    device: Device | None = None,
) -> Iterator[RealMachine]:
    """Yield the machine *kind*; at the end nothing of it is left.

    *folder* is where a disk machine keeps its files. *device* stands in for the first CUDA device,
    and stays the caller's to close.

    Raises:
        InputError: If there is none such here.
    """
    if kind == "disk":
        yield Disk(folder, lanes=lanes, pace=pace, threads=threads)
        return
    refuse_pace(pace)
    own = closing(open_cuda()) if device is None else nullcontext(device)
    with own as found, CudaRuns(found, lanes=lanes) as runs:
        yield Cuda(found, runs, lanes)


def layout_key(precision: Precision) -> str:
    """Return a key that policies share whose *precision* lays slices out alike."""
    return json.dumps([precision.kernel, {k: str(v) for k, v in vars(precision).items()}])


def _cut(header: Header, layers: int) -> Header:
    """Return *header* of a model that ends after *layers* MoE layers."""
    return header.model_copy(update={"geometry": header.geometry.first_layers(layers)})
