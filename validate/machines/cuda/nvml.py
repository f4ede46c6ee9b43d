"""This module reads a GPU's energy counter and its link through NVML, where that is installed."""

from __future__ import annotations

import importlib
from typing import Any


class Counter:
    """The counter of the GPU with the id *uuid*; silent where the package `pynvml` is missing."""

    def __init__(self, uuid: str) -> None:
        """Open NVML, if that can be done."""
        self._nvml: Any = None
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return
        try:
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByUUID(
                uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
            )
        except nvml.NVMLError:
            return
        self._nvml = nvml

    def energy(self) -> int | None:
        """Return the microjoules since the driver was loaded; None where it does not count."""
        if self._nvml is None:
            return None
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) * 1000
        except self._nvml.NVMLError:  # GPUs before Volta have none
            return None

    def link(self) -> str | None:
        """Return the widest PCIe link that card and slot can make, such as "gen 5 x16"."""
        if self._nvml is None:
            return None
        try:
            generation = self._nvml.nvmlDeviceGetMaxPcieLinkGeneration(self._handle)
            width = self._nvml.nvmlDeviceGetMaxPcieLinkWidth(self._handle)
        except self._nvml.NVMLError:
            return None
        return f"gen {generation} x{width}"

    def close(self) -> None:
        """Close NVML; closing twice does nothing."""
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            nvml.nvmlShutdown()
