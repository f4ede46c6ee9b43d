"""This module moves slices over a machine's links: what a batch waits for, and when it lands.

It is the general case: several links one after the other, several lanes each, somebody watching.
`machine.one_lane` does the same for a single unwatched lane, several times as fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby
from typing import Protocol

from moetier.sim.layout import Layout
from moetier.sim.machine.base import OnSpan, Span
from moetier.sim.machine.hierarchy import Hierarchy
from moetier.sim.machine.links import NEVER, UNSTARTED, LinkTime, OnStart, Transfer, by_ready
from moetier.sim.plan import LayerPlan

# When the copies of a batch landed, in ns, or the time it asked where there were none: all that the
# fastest tier needs; all that was demanded, promoted prefetches included; all that the CPU needs.
# Then how many prefetches were needed and had not landed. (A plain tuple: one is made per batch.)
Moved = tuple[int, int, int, int]


class Fabric(Protocol):
    """The links of a machine. Times given to one fabric never go back."""

    arrivals: dict[int, int] | None
    """When each slice that the last `move` brings to the fastest tier lands; None: not kept."""

    def move(self, plan: LayerPlan, asked: int) -> Moved:
        """Order the copies of *plan* at time *asked*."""
        ...

    def drop(self, slices: Sequence[int], now: int) -> int:
        """Give up *slices*, which leave the top; return the bytes of prefetches dropped."""
        ...

    def demote(self, slices: Sequence[int], now: int) -> None:
        """Begin to copy *slices* down to the second tier."""
        ...

    def landed(self, slice_id: int, now: int) -> bool:
        """Return whether a planned-resident slice has arrived in the fastest tier."""
        ...

    def queued_bytes(self, now: int) -> int:
        """Return the bytes of prefetches that are queued or in flight towards the fastest tier."""
        ...

    def cancel(self, slices: Sequence[int], now: int) -> list[int]:
        """Withdraw the queued prefetches among *slices*; return those that had not started."""
        ...

    def finish(self) -> int:
        """Let everything land; return the time at which the last link falls idle."""
        ...

    def busy(self) -> list[int]:
        """Return the busy time of each link in ns, summed over its lanes, fastest first."""
        ...


class Links:
    """Any number of links and lanes."""

    def __init__(self, hierarchy: Hierarchy, layout: Layout, on_span: OnSpan | None = None) -> None:
        """Begin idle; *on_span* hears of every transfer."""
        self._layout, self._nbytes, self._on_span = layout, layout.nbytes, on_span
        self.arrivals: dict[int, int] | None = {} if hierarchy.overlap else None
        self._up = [
            LinkTime(x, self._watch(f"{x.src} to {x.dst}"), bool(hierarchy.slowdown))
            for x in hierarchy.links
        ]
        self._down = [LinkTime(x, self._watch(f"{x.src} to {x.dst}")) for x in hierarchy.demotion]
        self._under_way: dict[int, Transfer] = {}  # prefetched and not asked for yet

    def move(self, plan: LayerPlan, asked: int) -> Moved:
        """Order the copies of *plan* at time *asked*.

        Demands are served in this order: prefetches that are promoted, fetches, slices for the CPU.
        """
        self._advance(asked)
        nbytes = self._nbytes
        late = self._late(plan.needed, asked) if self._under_way else []
        demands = [t for t in late if t.start == UNSTARTED]
        for t in demands:
            self._up[t.hop].withdraw(t)
            t.demanded, t.ready = True, max(t.ready, asked)
        hops = plan.fetch_hops or [1] * len(plan.fetch)
        fetched = [
            Transfer(s, nbytes[s], n - 1, asked, True)
            for s, n in zip(plan.fetch, hops, strict=True)
        ]
        for_cpu = [
            Transfer(s, nbytes[s], n, asked, True, last=1)
            for s, n in zip(plan.cpu, plan.cpu_hops or (), strict=False)
            if n
        ]
        demands += fetched + for_cpu
        ahead = plan.prefetch_hops or [1] * len(plan.prefetch)
        for s, n in zip(plan.prefetch, ahead, strict=True):
            transfer = self._under_way[s] = Transfer(s, nbytes[s], n - 1, asked, False)
            self._up[n - 1].enqueue(transfer)
        if demands:
            self._serve(demands)
        if self.arrivals is not None:
            self.arrivals = {t.slice_id: t.done for t in chain(fetched, late)}
        landed = max([asked, *[t.done for t in fetched], *[t.done for t in late]])
        copied = max([asked, *[t.done for t in demands]])
        cpu_ready = max([asked, *[t.done for t in for_cpu]])
        return landed, copied, cpu_ready, len(late)

    def drop(self, slices: Sequence[int], now: int) -> int:
        """Give up *slices*, which leave the top; return the bytes of prefetches dropped."""
        dropped = 0
        if self._under_way:
            self._advance(now)
            for s in slices:
                transfer = self._under_way.pop(s, None)
                if transfer is not None and transfer.start == UNSTARTED:
                    dropped += transfer.nbytes
                    if transfer.hop == 0:
                        self._up[0].withdraw(transfer)
                    else:
                        transfer.last = 1
        return dropped

    def demote(self, slices: Sequence[int], now: int) -> None:
        """Begin to copy *slices* down to the second tier."""
        nbytes = self._nbytes
        self._down[0].demand(now, [Transfer(s, nbytes[s], 0, now, True) for s in slices])

    def landed(self, slice_id: int, now: int) -> bool:
        """Return whether a planned-resident slice has arrived in the fastest tier."""
        self._advance(now)
        transfer = self._under_way.get(slice_id)
        return transfer is None or transfer.landed(now)

    def queued_bytes(self, now: int) -> int:
        """Return the bytes of prefetches that are queued or in flight towards the fastest tier."""
        self._advance(now)
        return sum(t.nbytes for t in self._under_way.values() if not t.landed(now))

    def cancel(self, slices: Sequence[int], now: int) -> list[int]:
        """Withdraw the queued prefetches among *slices*; return those that had not started."""
        self._advance(now)
        withdrawn = []
        for s in slices:
            transfer = self._under_way.get(s)
            if transfer and transfer.start == UNSTARTED and transfer.hop == transfer.first:
                self._up[transfer.hop].withdraw(transfer)
                del self._under_way[s]
                withdrawn.append(s)
        return withdrawn

    def occupied(self, at: int) -> tuple[bool, int]:
        """Return whether a copy into the fastest tier runs at *at*, and until when that is sure.

        Nothing else may happen in that nanosecond, for lanes are given out at its end.
        """
        self._advance(at + 1)
        busy, until = self._up[0].occupied(at)
        if busy:
            return True, until
        # What a lower link starts may reach the fastest tier next.
        return False, min([until, *[link.next_start() for link in self._up]])

    def finish(self) -> int:
        """Let everything land; return the time at which the last link falls idle."""
        self._advance(NEVER)
        return max(chain.from_iterable(link.free for link in chain(self._up, self._down)))

    def busy(self) -> list[int]:
        """Return the busy time of each link in ns, summed over its lanes, fastest first."""
        return [link.busy for link in self._up]

    def _late(self, needed: Sequence[int], asked: int) -> list[Transfer]:
        """Take the prefetches of *needed* off the books; return those that have not landed."""
        asked_for = [self._under_way.pop(s) for s in needed if s in self._under_way]
        return [t for t in asked_for if not t.landed(asked)]

    def _serve(self, demands: list[Transfer]) -> None:
        """Carry demands up, link by link from the slowest, in the order they become ready."""
        for hop in reversed(range(len(self._up))):
            here = [t for t in demands if t.hop == hop and t.start == UNSTARTED]
            here.sort(key=by_ready)
            for ready, group in groupby(here, key=by_ready):
                self._advance(ready, hop)
                self._up[hop].demand(ready, list(group))
            for t in here:
                t.hand_on()

    def _advance(self, to: int, fastest: int = 0) -> None:
        """Start the prefetches whose turn came before *to*, on links up to *fastest*."""
        for hop in range(len(self._up) - 1, fastest - 1, -1):
            for transfer in self._up[hop].advance(to):
                if transfer.hand_on():
                    self._up[transfer.hop].enqueue(transfer)

    def _watch(self, label: str) -> OnStart | None:
        """Return a callback that shows a link's transfers, where somebody watches."""
        on_span, layout = self._on_span, self._layout
        if on_span is None:
            return None

        def show(transfer: Transfer, lane: int) -> None:
            s = transfer.slice_id
            cause = "demand" if transfer.demanded else "prefetch"
            info = {"cause": cause, "bytes": transfer.nbytes, "slice": s}
            name = f"{cause} L{layout.layer_of(s)} E{layout.expert_of(s)}"
            on_span(Span(f"link {label} lane {lane}", name, transfer.start, transfer.done, info))

        return show
