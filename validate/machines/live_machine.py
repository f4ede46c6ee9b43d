"""This module gives a batch of a running model a beginning and an end, while the model computes.

The planner and the rules of the lanes are those of a trace. What differs is that compute is not the
machine's: the dense part is whatever happened since the last batch, and the experts are done when
the model says so, so that a record is written only then.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moetier.sim.machine.base import LayerTiming
from moetier.sim.plan import LayerPlan
from moetier.traces.batch import LayerBatch
from moetier.traces.live import Choice
from moetier.validate.live import Driver
from moetier.validate.machines.experts import as_tensor
from moetier.validate.machines.lanes import Asked
from moetier.validate.machines.spans import Piece
from moetier.validate.machines.tier import SlotTier


class LiveMachine(SlotTier):
    """A `Machine` whose compute is a model's, so that a batch has a `begin` and an `end`."""

    _open: tuple[LayerPlan, int, Asked, int, int] | None = None

    def execute(self, plan: LayerPlan) -> LayerTiming:
        """Refuse: a batch of a running model has a beginning and an end."""
        raise NotImplementedError("use `begin` and `end`")

    def begin(self, plan: LayerPlan) -> None:
        """Order what *plan* needs and wait until it is there; time since the last batch is dense.

        Raises:
            InputError: If a copy fails, memory ran out, or the plan wants what this machine cannot
                do.
        """
        self._settle()
        dropped, start = self._clear(plan), self.now
        asked = self._order(plan)
        self.lanes.wait(asked.fetched + asked.late)
        self._open = plan, start, asked, dropped, self._clock.now()

    def end(self) -> tuple[LayerPlan, LayerTiming] | None:
        """Note that the experts are computed; return the batch and its times, None without one."""
        opened, self._open = self._open, None
        if opened is None:
            return None
        plan, start, asked, dropped, begin = opened
        self._settle()
        pieces = [Piece("experts", begin, self._clock.now())]
        return plan, self._end(plan, start, asked, pieces, dropped)

    def _settle(self) -> None:
        """Return once all that the model was told to compute is computed."""

    def data(self, slices: Sequence[int]) -> list[Tensor]:
        """Return the bytes of *slices*; what no plan has brought is read aside, uncounted."""
        found = [self._held[s].slot if s in self._held else None for s in slices]
        if None in found:
            away = {s for s, slot in zip(slices, found, strict=True) if slot is None}
            if self._open is not None and not away.isdisjoint(self._open[0].needed):
                raise RuntimeError(f"slices {sorted(away)} are needed and not there")
            with self._clock.stopped():
                found = [
                    self._store.read_aside(s) if slot is None else slot
                    for s, slot in zip(slices, found, strict=True)
                ]
        return [tensor for slot in found if (tensor := as_tensor(slot)) is not None]


class RealDriver(Driver):
    """A `Driver` of a `LiveMachine`, whose batches end when the model says so."""

    def decide(self, batch: LayerBatch) -> Choice | None:
        """Plan *batch* and bring what it needs; return what the model shall compute."""
        plan = self._planner.step(batch)
        self._real.begin(plan)
        return self._choice(batch, plan)

    @property
    def _real(self) -> LiveMachine:
        assert isinstance(self.machine, LiveMachine)
        return self.machine

    def computed(self) -> None:
        """Note that the experts of a layer are computed."""
        done = self._real.end()
        if done is not None and self.recording:
            self._recorder.add(*done)
