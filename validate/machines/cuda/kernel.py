"""This module says what computes experts on a device, and refuses what nothing computes there."""

from __future__ import annotations

from moetier.sim.policy.base import Precision
from moetier.sim.policy.precision.channels import Channels
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.validate.machines.experts import Kernel
from moetier.validate.machines.kernels.of_policy import kernel_of


def refuse_channels(precision: Precision) -> None:
    """Raise `InputError` if *precision* reads channels, which only code for the CPU computes."""
    if isinstance(precision, Channels):
        raise InputError(
            "channels are computed by code for the CPU, and not on a device",
            where="policy.precision",
            way_out="use `full`, `uniform`, `bit-sliced` or `hobbit`, or the disk machine",
        )


def device_kernel(precision: Precision, geometry: Geometry, weights: str) -> Kernel:
    """Return what computes experts that *precision* stores in *weights*, on a device.

    Raises:
        InputError: If nothing does.
    """
    refuse_channels(precision)
    return kernel_of(precision, geometry, weights)
