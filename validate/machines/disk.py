"""This module performs plans on a disk, memory and a CPU: a machine whose time is real.

It mirrors `sim.machine.simulated` step by step: the dense part, then the copies in the order of a
link's rules, the wait, the experts, and at the end what has left the plan is forgotten. A batch
begins when the one before ended, so what the host program does in between, the planner included, is
part of the dense part, as the host time per layer of a profile is.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from moetier.sim.layout import Layout
from moetier.sim.machine.base import LayerTiming, OnSpan
from moetier.sim.machine.costs import Costs
from moetier.sim.machine.hierarchy import Hierarchy
from moetier.sim.plan import LayerPlan
from moetier.sim.policy.base import Precision
from moetier.traces.batch import LayerBatch
from moetier.validate.machines.dense import Dense
from moetier.validate.machines.experts import Experts, Kernel, RandomHidden, Routed, WholeKernel
from moetier.validate.machines.lanes import Transfer
from moetier.validate.machines.pacing import Pace
from moetier.validate.machines.slices_file import SlicesFile
from moetier.validate.machines.spans import Piece
from moetier.validate.machines.tier import DiskTier

Hidden = Callable[[LayerBatch], Tensor]
"""From a batch to the hidden states that enter its layer, (T, H)."""


class DiskMachine(DiskTier):
    """A `Machine` that reads slices from a file and computes on the CPU; close it after use.

    `output` holds what the experts of the last batch added up to, (T, H).
    """

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
        self.output: Tensor | None = None
        try:
            self._experts = Experts(kernel or WholeKernel(geometry, weights), precision)
            self.dense = Dense(costs.dense, geometry, weights, context=context, seed=seed)
        except BaseException:  # the lanes are threads
            self.close()
            raise
        self._hidden = hidden or RandomHidden(self.dense.hidden, self._experts.kernel.dtype, seed)

    def execute(self, plan: LayerPlan) -> LayerTiming:
        """Perform one batch and return when its parts happened.

        Raises:
            InputError: If the file was cut short, changed or removed, memory ran out, or the plan
                wants what this machine cannot do.
        """
        dropped, start = self._clear(plan), self.now
        x = self._hidden(plan.batch)
        self.dense.run(plan.batch, x.to(self.dense.dtype))
        asked = self._order(plan)
        pieces = self._compute(plan, x, asked.fetched + asked.late, asked.at)
        return self._end(plan, start, asked, pieces, dropped)

    def _compute(
        self, plan: LayerPlan, x: Tensor, copies: list[Transfer], asked: int
    ) -> list[Piece]:
        """Wait for *copies* and compute the experts; return the pieces of compute as they ran.

        Without overlap that is one piece. With it each expert is one, in the order in which their
        last slices landed (resident ones first, ties in plan order).
        """
        experts = self._parts(plan)
        routed = self._experts.routed(plan.batch, experts, plan.degrade)
        outputs: dict[int, Tensor] = {}
        pieces: list[Piece] = []
        if not self._overlap:
            self.lanes.wait(copies)
        name, waiting, now = "experts", dict(experts), self._clock.now
        begin = now()
        while waiting:
            expert = self._next_ready(waiting, asked) if self._overlap else min(waiting)
            if self._overlap:
                name, begin = f"expert {expert}", now()
            outputs[expert] = self._run(waiting.pop(expert), routed[expert], x)
            if self._overlap and waiting:
                pieces.append(Piece(name, begin, now()))
        self.output = self._experts.add_up(outputs, routed, x)
        if experts:
            pieces.append(Piece(name, begin, now()))
        return pieces

    def _parts(self, plan: LayerPlan) -> dict[int, list[Transfer | None]]:
        """Return the parts of each expert that is computed; None for what compute does without."""
        layout, without = self._layout, set(plan.degrade)
        away = without.union(plan.skip)
        found: dict[int, list[Transfer | None]] = {}
        for s in plan.needed:
            if s not in away:
                expert = layout.expert_of(s)
                parts = found.setdefault(expert, [None] * layout.n_parts)
                parts[layout.part_of(s)] = self._held[s]
        return found

    def _run(self, parts: list[Transfer | None], routed: Routed, x: Tensor) -> Tensor:
        slots = [None if t is None else t.slot for t in parts]
        return self._experts.run(slots, routed, x)

    def _next_ready(self, waiting: dict[int, list[Transfer | None]], asked: int) -> int:
        """Wait until one of the experts *waiting* is all there; return the one that came first."""

        def there() -> list[tuple[int, int]]:
            return [
                (max([asked, *[t.done for t in parts if t is not None]]), expert)
                for expert, parts in waiting.items()
                if all(t is None or t.landed for t in parts)
            ]

        self.lanes.until(lambda: bool(there()))
        return min(there(), key=lambda found: found[0])[1]
