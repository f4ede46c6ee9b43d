"""This module turns a run's bytes, operations and time into energy, component by component.

    energy = sum of bytes x energy per bit over tiers and links
           + operations x energy per operation + static power x time

Everything is computed in whole femtojoules and rounded up once, to picojoules.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from moetier.sim.machine.hierarchy import Hierarchy
from moetier.sim.machine.work import DenseWork

Ints = npt.NDArray[np.int64]

COMPONENTS = ("compute", "fast_tier", "lower_tiers", "links", "static")


class Energy:
    """The energy of batches, as arrays over the rows of a record block.

    The fastest tier is read for every weight and key/value byte that is computed with, and written
    by every copy into it; lower tiers are read by copies and by experts computed there, and written
    where a slice stops on its way. Copies are charged to the batch that ordered them.
    """

    def __init__(self, hierarchy: Hierarchy, dense: DenseWork, expert_ops: int) -> None:
        """Take the machine and the model's operations per expert and token."""
        self._h, self._dense, self._expert_ops = hierarchy, dense, expert_ops

    def of(self, rows: Mapping[str, Ints]) -> tuple[Ints, ...]:
        """Return one array of picojoules per component, in the order of `COMPONENTS`."""
        h = self._h
        work = self._dense.of(rows["layer"], rows["phase"], rows["tokens"], rows["context"])
        main = rows["assignments"] - rows["cpu_assignments"]
        unread = (
            rows["cpu_bytes"]
            + rows["skipped_bytes"]
            + rows["degraded_bytes"]
            + rows["spared_bytes"]
        )
        read = work.nbytes + rows["lookup_bytes"] - unread
        withdrawn = rows["cancelled_bytes"] + rows["dropped_bytes"]
        into = rows["fetch_bytes"] + rows["prefetch_bytes"] - withdrawn
        below, demoted = rows["lower_bytes"], rows["demoted_bytes"]
        fast, second = h.tiers[0], h.tiers[1]
        compute = (work.ops + main * self._expert_ops) * h.main.energy
        if h.cpu is not None:
            compute = compute + rows["cpu_assignments"] * self._expert_ops * h.cpu.energy
        lower = (into + rows["cpu_bytes"]) * second.read_energy
        links = into * h.links[0].energy
        if len(h.tiers) > 2:
            lower = lower + below * (h.tiers[2].read_energy + second.write_energy)
            links = links + below * h.links[1].energy
        if h.demotion:
            lower = lower + demoted * second.write_energy
            links = links + demoted * h.demotion[0].energy
        parts = (
            compute,
            (read + demoted) * fast.read_energy + into * fast.write_energy,
            lower,
            links,
            (rows["end_ns"] - rows["start_ns"]) * h.static_power,
        )
        return tuple(-(-part // 1000) for part in parts)
