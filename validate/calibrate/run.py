"""This module calibrates: it opens a machine, measures it, and writes a profile."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from moetier.sim.hardware import Profile
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.validate.calibrate.device import Device
from moetier.validate.calibrate.measure import OnProgress, measure
from moetier.validate.calibrate.profile import profile_of, write_profile

MACHINES = ("disk", "cuda")


def calibrate(
    machine: str,
    out: str | Path,
    geometry: Geometry,
    weights: str = "bf16",
    folder: str | Path = ".",
    *,
    seconds: float = 120,
    on_progress: OnProgress | None = None,
    **given: Any,
) -> Profile:
    """Measure *machine* in about *seconds* and write a profile of it to *out*, which is replaced.

    *geometry* and *weights* say which experts and dense parts are timed; *folder* is where the
    expert file of later runs lies. *given* goes to the machine: lanes, pace, threads, and
    *precisions*, whose ways to compute an expert are timed beside whole ones.

    Raises:
        InputError: If there is no such machine here, or it cannot do what is asked.
    """
    target = Path(out)
    _check_target(target)
    if seconds <= 0:
        raise InputError(f"{seconds} seconds", where="seconds", way_out="give more than none")
    with open_device(machine, geometry, weights, Path(folder), **given) as device:
        used = max(geometry.top_k, 2)  # by a token
        figures = measure(device, seconds, on_progress, together=used)
        profile = profile_of(target.stem, device, figures, f"{geometry.name} in {weights}")
    write_profile(target, profile)
    return profile


def open_device(
    machine: str, geometry: Geometry, weights: str, folder: Path, **given: Any
) -> AbstractContextManager[Device]:
    """Return *machine* as a device to measure; raise `InputError` where there is none such."""
    if importlib.util.find_spec("torch") is None:
        raise InputError(
            "calibration computes with torch, which is not installed",
            way_out="`pip install moetier[models]`",
        )
    if machine == "disk":
        from moetier.validate.calibrate.disk import disk_device

        return disk_device(geometry, weights, folder, **given)
    if machine == "cuda":
        from moetier.validate.calibrate.cuda import cuda_device
        from moetier.validate.machines.cuda.torch_cuda import require_cuda

        if given.get("device") is None:
            require_cuda()
        return cuda_device(geometry, weights, **given)
    raise InputError(f"unknown machine '{machine}'", way_out=f"known: {', '.join(MACHINES)}")


def _check_target(path: Path) -> None:
    """Raise `InputError` before minutes are spent on what cannot be written or loaded."""
    if path.suffix not in (".yaml", ".yml"):
        raise InputError(
            "a profile is a YAML file", where=path, way_out=f"call it {path.stem}.yaml"
        )
    if not path.parent.is_dir():
        raise InputError(
            f"directory '{path.parent}' does not exist", where=path, way_out="create it first"
        )
