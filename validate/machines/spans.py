"""This module shows what a real machine did, in the lanes in which a simulation shows it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from moetier.sim.layout import Layout
from moetier.sim.machine.base import OnSpan, Span
from moetier.sim.machine.hierarchy import Hierarchy
from moetier.sim.plan import LayerPlan
from moetier.validate.machines.lanes import Transfer


class Piece(NamedTuple):
    """A stretch of compute, in ns."""

    name: str
    begin: int
    end: int


class Timeline:
    """Collects transfers from the lanes' threads, and tells the observer of them from one."""

    def __init__(self, on_span: OnSpan, layout: Layout, hierarchy: Hierarchy) -> None:
        """Tell *on_span*."""
        link = hierarchy.links[0]
        self._on_span, self._layout = on_span, layout
        self._link, self._fast = f"link {link.src} to {link.dst}", hierarchy.names[0]
        self._transfers: deque[Transfer] = deque()

    def landed(self, transfer: Transfer) -> None:
        """Note a transfer; may be called from any thread."""
        self._transfers.append(transfer)

    def show(self, plan: LayerPlan, start: int, asked: int, pieces: Sequence[Piece]) -> None:
        """Tell of a batch that began at *start* and asked for copies at *asked*."""
        self.show_transfers()
        where = {"step": plan.batch.step, "layer": plan.batch.layer}
        self._on_span(Span("compute", "dense", start, asked, where))
        for piece in pieces:
            if piece.begin > asked:
                self._on_span(Span("compute", "wait", asked, piece.begin, where))
            self._on_span(Span("compute", piece.name, piece.begin, piece.end, where))
            asked = piece.end
        at = pieces[-1].begin if pieces else asked
        level = {"bytes": plan.resident}
        self._on_span(Span(f"resident in {self._fast}", "bytes", at, at, level))

    def show_transfers(self) -> None:
        """Tell of the transfers that landed since the last time."""
        while self._transfers:
            t = self._transfers.popleft()
            cause = "demand" if t.demanded else "prefetch"
            name = f"{cause} L{self._layout.layer_of(t.slice_id)} "
            name += f"E{self._layout.expert_of(t.slice_id)}"
            info = {"cause": cause, "bytes": t.nbytes, "slice": t.slice_id}
            self._on_span(Span(f"{self._link} lane {t.lane}", name, t.start, t.done, info))
