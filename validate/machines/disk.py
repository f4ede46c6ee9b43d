"""This module performs plans on a disk, memory and a CPU."""

from __future__ import annotations

from moetier.sim.layout import Layout
from moetier.sim.machine.base import OnSpan
from moetier.sim.machine.costs import Costs
from moetier.sim.machine.hierarchy import Hierarchy
from moetier.sim.policy.base import Precision
from moetier.validate.machines.dense import Dense
from moetier.validate.machines.experts import Experts, Kernel, RandomHidden, WholeKernel
from moetier.validate.machines.pacing import Pace
from moetier.validate.machines.slices_file import SlicesFile
from moetier.validate.machines.trace_machine import Hidden, TraceMachine


class DiskMachine(TraceMachine):
    """A `Machine` that reads slices from a file and computes on the CPU; close it after use."""

    def __init__(
        self,
        file: SlicesFile,
        hierarchy: Hierarchy,
        costs: Costs,
        layout: Layout,
        on_span: OnSpan | None = None,
        *,
        lanes: int | None = None,
        pace: Pace | None = None,
        slot_bytes: int | None = None,
        context: int = 0,
        kernel: Kernel | None = None,
        precision: Precision | None = None,
        hidden: Hidden | None = None,
        seed: int = 0,
    ) -> None:
        """Get ready; time begins with the first batch.

        Args:
            file: The slices; it stays the caller's to close.
            hierarchy: Two tiers, and the link between them.
            costs: What the dense part counts.
            layout: The slices of the run, which must be those of the file.
            on_span: Hears of what occupied compute and lanes, in the calling thread.
            lanes: Threads that read; by default as many as the link has lanes.
            pace: What each lane is held to; without one it reads as fast as it can.
            slot_bytes: Memory for slices; by default room for all of them.
            context: Most key/value entries of a batch, to make room beforehand.
            kernel: Computes an expert; by default whole experts as plain matrices.
            precision: That of the running policy, which knows the level and the channels of each
                token; without one all are alike.
            hidden: Gives the hidden states; by default random ones.
            seed: Of dense weights and hidden states.

        Raises:
            InputError: If the file does not fit the run, there are more than two tiers, or the
                memory does not suffice.
        """
        super().__init__(
            file, hierarchy, layout, on_span, lanes=lanes, pace=pace, slot_bytes=slot_bytes
        )
        geometry, weights = file.index.geometry, file.index.weights
        try:
            self._experts = Experts(kernel or WholeKernel(geometry, weights), precision)
            self.dense = Dense(costs.dense, geometry, weights, context=context, seed=seed)
        except BaseException:  # the lanes are threads
            self.close()
            raise
        self._hidden = hidden or RandomHidden(self.dense.hidden, self._experts.kernel.dtype, seed)
