"""This module says in advance what the description of a machine lets one expect."""

from __future__ import annotations

from collections.abc import Sequence

from moetier.sim.layout import Layout
from moetier.sim.machine.costs import Costs
from moetier.sim.machine.hierarchy import Hierarchy
from moetier.sim.machine.tables import computed_experts
from moetier.sim.units import ceil_div
from moetier.traces.batch import LayerBatch


class ProfileEstimates:
    """Expected times on one machine, without a look at its clock or its queues."""

    def __init__(self, hierarchy: Hierarchy, costs: Costs, layout: Layout) -> None:
        """Take the link into the fastest tier at the size of the largest slice, all lanes busy."""
        link, self._size = hierarchy.links[0], max(layout.nbytes)
        self._experts, self._dense_ns, self._layer_size = (
            costs.experts,
            costs.dense_ns,
            layout.layer_size,
        )
        self._tabled, self._n_parts = costs.tabled, layout.n_parts
        last = layout.n_layers - 1
        self._next = [min(layer + 1, last) for layer in range(layout.n_layers)]
        self._copy, self._lanes = link.copy_ns(self._size, link.lanes), link.lanes

    def window_ns(self, batch: LayerBatch, needed: Sequence[int], horizon: int) -> int:
        """Return the compute time from now until the experts *horizon* layers later begin.

        Now is the end of the dense part of *batch*, which uses *needed*: its experts come first,
        then the dense parts of the layers up to the target and, between them, experts like its own.
        """
        count = computed_experts(needed, (), self._n_parts) if self._tabled else 0
        total = horizon * self._experts(self._layer_size(needed), len(batch.experts), count)
        layer = batch.layer
        while horizon:
            layer = self._next[layer]
            total += self._dense_ns(batch, layer)
            horizon -= 1
        return total

    def copy_ns(self, nbytes: int) -> int:
        """Return what *nbytes* more add to the time of a busy link into the fastest tier."""
        return ceil_div(nbytes * self._copy, self._size * self._lanes)
