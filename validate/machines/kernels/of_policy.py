"""This module chooses the kernel that computes what a policy's precision stores."""

from __future__ import annotations

from moetier.sim.policy.base import ExpertFormat, Precision
from moetier.sim.policy.precision.bit_sliced import BitSliced
from moetier.sim.policy.precision.channels import Channels
from moetier.sim.policy.precision.hobbit import Hobbit
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.validate.machines.experts import Kernel, WholeKernel
from moetier.validate.machines.kernels.bit_sliced import BitSlicedKernel
from moetier.validate.machines.kernels.codes import CodesKernel
from moetier.validate.machines.kernels.copies import CopiesKernel


def kernel_of(precision: Precision, geometry: Geometry, weights: str, seed: int = 0) -> Kernel:
    """Return what computes experts of *geometry*, stored as *precision* stores them.

    Whole experts are of the format *weights*; *seed* is of what a kernel keeps beside the slices.

    Raises:
        InputError: If nothing can.
    """
    match precision:
        case BitSliced():
            return BitSlicedKernel(geometry, precision.bits, precision.group)
        case Hobbit():
            high, low = (_of_format(kind, geometry, weights) for kind in precision.formats)
            return CopiesKernel(high, low)
        case Channels():
            # numba, which compiles it, is an extra
            from moetier.validate.machines.kernels.channels import ChannelsKernel

            return ChannelsKernel(geometry, weights, precision, seed)
    if len(precision.formats) == 1:
        return _of_format(precision.formats[0], geometry, weights)
    raise InputError(
        f"no kernel computes precision '{type(precision).__name__}'",
        where="policy.precision",
        way_out="use `full`, `uniform`, `bit-sliced`, `hobbit` or `channels`",
    )


def _of_format(kind: ExpertFormat, geometry: Geometry, weights: str) -> Kernel:
    if kind.bits is None:
        return WholeKernel(geometry, weights)
    return CodesKernel(geometry, kind.bits, kind.group)
