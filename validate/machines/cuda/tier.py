"""This module keeps slices on a device, over pinned memory: what both CUDA machines share."""

from __future__ import annotations

from functools import partial

from moetier.sim.layout import Layout
from moetier.sim.machine.base import OnSpan
from moetier.sim.machine.hierarchy import Hierarchy
from moetier.validate.machines.cuda.device import Device
from moetier.validate.machines.cuda.host import DeviceSlots, DeviceStore, HostSlices
from moetier.validate.machines.tier import SlotTier


class DeviceTier(SlotTier):
    """Slots on a device over slices in pinned memory; name it before the machine that computes."""

    def __init__(
        self,
        host: HostSlices,
        device: Device,
        hierarchy: Hierarchy,
        layout: Layout,
        on_span: OnSpan | None,
        *,
        lanes: int,
        slot_bytes: int | None,
    ) -> None:
        """Get ready; the arguments are those of `CudaMachine`, and so are the errors."""
        self._device = device
        # one more than lanes: what is warm is copied by the thread that computes
        self._reader = DeviceStore(host, device, lanes + 1)
        try:
            super().__init__(
                self._reader,
                hierarchy,
                layout,
                on_span,
                lanes=lanes,
                slot_bytes=slot_bytes,
                pool=partial(DeviceSlots, device=device),
            )
        except BaseException:
            self._reader.close()
            raise

    def close(self) -> None:
        """End all threads and streams, and give the device's memory back."""
        self.lanes.close()
        self._reader.close()
        super().close()
