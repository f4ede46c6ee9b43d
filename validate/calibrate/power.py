"""This module reads the energy counter of the processor, where the system lets it (RAPL)."""

from __future__ import annotations

from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


def energy_uj(folder: Path = POWERCAP) -> int | None:
    """Return the microjoules that all processor packages counted; None where nothing can be read.

    The counter begins again at zero now and then, so a difference below zero means nothing.
    """
    try:
        packages = [path for path in folder.glob("*-rapl:*") if path.name.count(":") == 1]
        counts = [int((path / "energy_uj").read_text(encoding="ascii")) for path in packages]
    except OSError:
        return None
    return sum(counts) if counts else None
