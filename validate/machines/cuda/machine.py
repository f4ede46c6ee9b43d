"""This module performs plans with copies from pinned memory to a device, and matmuls there.

A lane is a copy stream with a thread that drives it, so that order, promotion and withdrawal are
those of `lanes`. Compute has a stream of its own. The host waits for the dense part, as a router's
choice must reach it before anything can be ordered, and for the experts at the end of a batch; in
between, with `overlap`, it only waits for copies, and when experts ran is read from events.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple

from moetier.sim.layout import Layout
from moetier.sim.machine.base import LayerTiming, OnSpan
from moetier.sim.machine.hierarchy import Hierarchy
from moetier.sim.plan import LayerPlan
from moetier.sim.policy.base import Precision
from moetier.validate.machines.cuda.device import Device, Event
from moetier.validate.machines.cuda.host import HostSlices
from moetier.validate.machines.cuda.tier import DeviceTier
from moetier.validate.machines.dense import Dense
from moetier.validate.machines.experts import Experts, Kernel, RandomHidden
from moetier.validate.machines.spans import Piece
from moetier.validate.machines.trace_machine import Hidden, TraceMachine

STOOD_STILL = 0.02  # share of the wall clock for which the machine's may stand still


class _Count(NamedTuple):
    """A reading of the energy counter, in microjoules, at a time of both clocks, in ns."""

    at: int
    wall: int
    energy: int | None


class CudaMachine(DeviceTier, TraceMachine):
    """A `Machine` on a device, with its experts in pinned memory; close it after use."""

    def __init__(
        self,
        host: HostSlices,
        device: Device,
        hierarchy: Hierarchy,
        layout: Layout,
        on_span: OnSpan | None = None,
        *,
        dense: Dense,
        kernel: Kernel,
        lanes: int | None = None,
        slot_bytes: int | None = None,
        precision: Precision | None = None,
        hidden: Hidden | None = None,
        seed: int = 0,
    ) -> None:
        """Get ready; time begins with the first batch.

        Args:
            host: The slices, which stay the caller's to close.
            device: Where to compute; it stays the caller's too.
            hierarchy: Two tiers, and the link between them.
            layout: The slices of the run, which must be those of the host.
            on_span: Hears of what occupied compute and lanes, in the calling thread.
            dense: Computes the dense part, on *device*.
            kernel: Computes an expert.
            lanes: Copies under way at once; by default as many as the link has lanes.
            slot_bytes: Memory for slices; by default room for all of them.
            precision: That of the running policy; without one all tokens are alike.
            hidden: Gives the hidden states; by default random ones.
            seed: Of hidden states.

        Raises:
            InputError: If the slices do not fit the run, there are more than two tiers, or the
                device's memory does not suffice.
        """
        used = lanes or hierarchy.links[0].lanes
        super().__init__(
            host, device, hierarchy, layout, on_span, lanes=used, slot_bytes=slot_bytes
        )
        self._counted: list[_Count] = []  # at the beginning and at the end
        self._compute_stream = device.stream()
        self.dense = dense
        self._experts = Experts(kernel, precision, device.torch)
        self._hidden = hidden or RandomHidden(dense.hidden, kernel.dtype, seed, device.torch)
        self._anchor: tuple[Event, int] = self._compute_stream.record(), 0

    def execute(self, plan: LayerPlan) -> LayerTiming:
        """Perform one batch and return when its parts happened; raises as `TraceMachine` does."""
        with self._compute_stream.running():
            return super().execute(plan)

    def wake(self) -> None:
        """Begin to count time, and energy."""
        if not self._began:
            super().wake()
            self._counted.append(_Count(0, perf_counter_ns(), self._device.energy()))

    def finish(self) -> int:
        """Let what is in flight land; return the time at which all is quiet, in ns."""
        end = super().finish()
        self._counted.append(_Count(end, perf_counter_ns(), self._device.energy()))
        return end

    @property
    def energy(self) -> int | None:
        """Return the microjoules from the first batch to `finish`.

        None where nothing counts them, where the counter is too slow for so short a run, and where
        the clock stood still for a while, as it does when warm slices are brought: the counter goes
        on then.
        """
        if len(self._counted) < 2:
            return None
        first, last = self._counted[0], self._counted[-1]
        ns, wall = last.at - first.at, last.wall - first.wall
        if first.energy is None or last.energy is None or ns < self._device.energy_window:
            return None
        return last.energy - first.energy if wall - ns <= wall * STOOD_STILL else None

    def close(self) -> None:
        """End all threads and streams, and give the device's memory back."""
        self.lanes.close()
        self._compute_stream.close()
        super().close()

    def _settle(self) -> None:
        self._compute_stream.synchronise()
        self._anchor = self._compute_stream.record(), self._clock.now()

    def _mark(self) -> Event:
        return self._compute_stream.record()

    def _pieces(self, marked: Sequence[tuple[str, Any, Any]], earliest: int) -> list[Piece]:
        self._compute_stream.synchronise()
        anchor, at = self._anchor
        latest = self._clock.now()

        def when(event: Event) -> int:
            # the two clocks agree within microseconds, and no piece may lie outside of its batch
            return min(max(at + event.since(anchor), earliest), latest)

        return [Piece(name, when(begin), when(end)) for name, begin, end in marked]
