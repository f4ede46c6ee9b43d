"""This module says which machine this is, and whether a calibrated profile is of it.

A profile that was measured holds for the machine it was measured on: its processor, memory, system,
versions, and the disk that the expert file lies on. A simulation may use it anywhere; what runs for
real beside it may not.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from moetier.sim.hardware import Profile
from moetier.sim.units import format_bytes
from moetier.traces.errors import InputError

Reader = Callable[[Path], str | None]
"""From the folder of the expert file to one fact, None where nothing says it."""

DISK = (
    "cpu", "cores", "memory", "os", "python", "torch", "threads", "file system", "device",
)  # fmt: skip
CUDA = (*DISK, "gpu", "driver", "cuda")
UNCOMPARED = ("date", "machine")
"""What identifies a measurement and not a machine."""


def identity(facts: tuple[str, ...] = DISK, folder: str | Path = ".") -> dict[str, str]:
    """Return what this machine says of *facts*, names to values; what it does not say is left out.

    *folder* is where the expert file lies. The date is the day, in UTC.
    """
    found = {name: READERS[name](Path(folder)) for name in facts}
    known = {name: value for name, value in found.items() if value is not None}
    return known | {"date": datetime.now(UTC).date().isoformat()}


def check_identity(
    profile: Profile, folder: str | Path = ".", given: Mapping[str, str] | None = None
) -> None:
    """Refuse a *profile* that was not measured on this machine.

    Args:
        profile: As it was loaded.
        folder: Where the expert file of the run lies.
        given: Facts that the caller knows better than the machine, such as the number of threads
            that will compute, or that the machine cannot know, such as the number format. A fact of
            the second kind that is not given is not compared.

    Raises:
        InputError: If the profile does not say where it was measured, or what it says differs,
            naming every difference.
    """
    if profile.identity is None:
        raise InputError(
            "does not say on which machine it was measured, so nothing real can be held against it",
            where=profile.name,
            way_out="measure this machine with `moetier calibrate`",
        )
    here = dict(given or {})
    for name in profile.identity:
        if name in READERS and name not in here:
            here[name] = READERS[name](Path(folder)) or "unknown"
    differing = [
        f"{name} is {here[name]} here and was {value}"
        for name, value in profile.identity.items()
        if name in here and name not in UNCOMPARED and here[name] != value
    ]
    if differing:
        raise InputError(
            f"was measured on another machine: {'; '.join(differing)}",
            where=profile.name,
            way_out="measure this one with `moetier calibrate`, or simulate without running",
        )


def _cpu(_: Path) -> str | None:
    names = _lines("/proc/cpuinfo", "model name") or _lines("/proc/cpuinfo", "Hardware")
    return names[0] if names else platform.processor() or None


def _cores(_: Path) -> str | None:
    allowed = getattr(os, "sched_getaffinity", None)  # a container may have fewer than there are
    return str(len(allowed(0)) if allowed else os.cpu_count())


def _memory(_: Path) -> str | None:
    found = _lines("/proc/meminfo", "MemTotal")
    return format_bytes(int(found[0].split()[0]) * 1024) if found else None


def _system(_: Path) -> str:
    return f"{platform.system()} {platform.release()} {platform.machine()}"


def _python(_: Path) -> str:
    return platform.python_version()


def _torch(_: Path) -> str | None:
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def _threads(_: Path) -> str | None:
    try:
        import torch
    except ImportError:
        return None
    return str(torch.get_num_threads())


def _mount(folder: Path) -> tuple[str, str] | None:
    """Return the type and the source of the file system that *folder* is on."""
    try:
        rows = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    try:
        device = folder.resolve().stat().st_dev
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=folder) from error
    number = f"{os.major(device)}:{os.minor(device)}"
    for row in reversed(rows):  # what was mounted last hides what was there
        before, _, after = row.partition(" - ")
        if before.split()[2] == number:
            kind, source = after.split()[:2]
            return kind, source
    return None


def _file_system(folder: Path) -> str | None:
    found = _mount(folder)
    return found[0] if found else None


def _device(folder: Path) -> str | None:
    found = _mount(folder)
    if found is None:
        return None
    model = Path("/sys/class/block") / Path(found[1]).name / "device" / "model"
    try:
        return f"{found[1]} ({model.read_text(encoding='utf-8').strip()})"
    except OSError:
        return found[1]


def _gpu(_: Path) -> str | None:
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _cuda(_: Path) -> str | None:
    try:
        import torch
    except ImportError:
        return None
    return torch.version.cuda


def _driver(_: Path) -> str | None:
    try:
        text = Path("/sys/module/nvidia/version").read_text(encoding="ascii")
    except OSError:
        return None
    return text.strip()


def _lines(path: str, key: str) -> list[str]:
    """Return the values of the lines "key : value" of the file *path* that have *key*."""
    try:
        rows = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    pairs = [row.partition(":") for row in rows]
    return [value.strip() for name, _, value in pairs if name.strip() == key]


READERS: dict[str, Reader] = {
    "cpu": _cpu,
    "cores": _cores,
    "memory": _memory,
    "os": _system,
    "python": _python,
    "torch": _torch,
    "threads": _threads,
    "file system": _file_system,
    "device": _device,
    "gpu": _gpu,
    "driver": _driver,
    "cuda": _cuda,
}
