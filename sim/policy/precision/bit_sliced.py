"""This module reads all bits of the experts that matter to a token, and half of the others'."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import numpy as np

from moetier.sim.layout import LSB, Layout
from moetier.sim.policy.base import Context, ExpertFormat, Precision
from moetier.sim.policy.precision.uniform import check_bits
from moetier.sim.policy.seams import precision
from moetier.traces.batch import Floats, LayerBatch
from moetier.traces.errors import InputError
from moetier.traces.formats import bit_slice_bytes
from moetier.traces.geometry import Geometry
from moetier.traces.registry import Positive


@precision.register("bit-sliced")
class BitSliced(Precision):
    """Read the MSB slice of every expert, and the LSB slice where the gate weight is high.

    Weights are codes of `bits[0]` bits; the MSB slice has the `bits[1]` highest of each. An expert
    is critical to a token whose gate weight for it is at least *theta*, and is computed for that
    token from both slices; for others from the MSB slice alone, as in SliceMoE (arXiv 2512.12990).
    The weight is the one the model mixes with: of all experts' softmax where the model does not
    renormalise the top-k, else a share of the chosen ones, which is larger for the same *theta*.
    """

    alters_output = True
    needs_weights = True
    example: ClassVar[dict[str, Any]] = {"group": 4}  # divides the rows of a toy

    def __init__(
        self,
        bits: tuple[Positive, Positive] = (8, 4),
        theta: float = 0.1,
        group: Positive = 32,
    ) -> None:
        self.bits, self.group = bits, group
        self.theta = float(np.float32(theta))  # as weights are: 0.1 is not below 0.1
        high, low = bits
        self.kernel = f"bit-sliced-{high}-{low}"
        self.formats = (
            ExpertFormat(high, group=group),
            ExpertFormat(low, inside=high, group=group),
        )

    def start(self, context: Context) -> None:
        super().start(context)
        self._layer_slices = context.layout.layer_slices

    def layout(self, expert_bytes: Sequence[int], geometry: Geometry) -> Layout:
        check_bits("bit-sliced", self.bits[0], expert_bytes, geometry)
        slices = bit_slice_bytes(geometry, *self.bits, self.group)
        return Layout([slices] * len(expert_bytes), geometry.n_experts, bit_sliced=True)

    def needed(self, batch: LayerBatch) -> list[int]:
        first, theta = batch.layer * self._layer_slices, self.theta
        found: list[int] = []
        for expert, weight in zip(batch.experts, weights_of(batch).tolist(), strict=True):
            msb = first + 2 * expert
            found.append(msb)
            if weight >= theta:
                found.append(msb + LSB)
        return found

    def levels(self, batch: LayerBatch, degraded: Collection[int]) -> list[int] | None:
        first, low = batch.layer * self._layer_slices, weights_of(batch) < np.float32(self.theta)
        if degraded:
            without = {(s - first) // 2 for s in degraded}
            low |= np.array([expert in without for expert in batch.experts])
        return low.astype(int).tolist() if low.any() else None


def weights_of(batch: LayerBatch) -> Floats:
    """Return the gate weight of each entry of *batch*; raise `InputError` where it has none."""
    if batch.weights is None:
        raise InputError(
            f"MoE layer {batch.layer} of step {batch.step} has no gate weights, which say which "
            "experts are critical",
            where="policy.precision",
            way_out="use a trace that has them on every row",
        )
    return batch.weights
