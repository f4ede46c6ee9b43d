"""This module performs plans with matmuls of its own, on slots: a machine whose time is real.

It mirrors `sim.machine.simulated` step by step: the dense part, then the copies in the order of a
link's rules, the wait, the experts, and at the end what has left the plan is forgotten. A batch
begins when the one before ended, so what the host program does in between, the planner included, is
part of the dense part, as the host time per layer of a profile is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from moetier.sim.machine.base import LayerTiming
from moetier.sim.plan import LayerPlan
from moetier.traces.batch import LayerBatch
from moetier.validate.machines.dense import Dense
from moetier.validate.machines.experts import Experts, Routed
from moetier.validate.machines.lanes import Transfer
from moetier.validate.machines.spans import Piece
from moetier.validate.machines.tier import SlotTier

Hidden = Callable[[LayerBatch], Tensor]
"""From a batch to the hidden states that enter its layer, (T, H)."""


class TraceMachine(SlotTier):
    """A `Machine` that computes each batch itself; whoever makes one sets what it computes with.

    `output` holds what the experts of the last batch added up to, (T, H).
    """

    dense: Dense
    output: Tensor | None = None
    _experts: Experts
    _hidden: Hidden

    def execute(self, plan: LayerPlan) -> LayerTiming:
        """Perform one batch and return when its parts happened.

        Raises:
            InputError: If a copy fails, memory ran out, or the plan wants what this machine cannot
                do.
        """
        dropped, start = self._clear(plan), self.now
        x = self._hidden(plan.batch)
        self.dense.run(plan.batch, x.to(self.dense.dtype))
        self._settle()
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
        marked: list[tuple[str, Any, Any]] = []
        if not self._overlap:
            self.lanes.wait(copies)
        name, waiting, mark = "experts", dict(experts), self._mark
        begin = mark()
        while waiting:
            expert = self._next_ready(waiting, asked) if self._overlap else min(waiting)
            if self._overlap:
                name, begin = f"expert {expert}", mark()
            outputs[expert] = self._run(waiting.pop(expert), routed[expert], x)
            if self._overlap and waiting:
                marked.append((name, begin, mark()))
        self.output = self._experts.add_up(outputs, routed, x)
        if experts:
            marked.append((name, begin, mark()))
        last = [] if self._overlap else [t.done for t in copies]
        return self._pieces(marked, max([asked, *last]))

    def _settle(self) -> None:
        """Return once the dense part is computed, whatever computes it."""

    def _mark(self) -> Any:
        """Return a mark of this place in the work, from which `_pieces` knows the time."""
        return self._clock.now()

    def _pieces(self, marked: Sequence[tuple[str, Any, Any]], earliest: int) -> list[Piece]:
        """Return the pieces *marked*, (name, begin, end), once they are computed.

        None of them began before the time *earliest*.
        """
        return [Piece(*one) for one in marked]

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
