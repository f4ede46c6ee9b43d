"""This module performs plans as SimPy processes, one event at a time: the slow twin of `simulated`.

It states the rules of `machine.links` a second time, in another way, so that a test can hold the
two against each other. Compute, every lane of a link and the dispatcher of every link are
processes; no end time is known before its event has happened. Within one nanosecond things happen
in this order:

1. copies land and free their lanes, processors finish (`NORMAL`, SimPy's own priority),
2. batches ask and end, so that control passes to the planner and back (`STEP`), and the main
   processor turns to the next expert,
3. links give idle lanes to what waits (`DISPATCH`),
4. where copies slow compute down, it takes note whether one is in flight (`PACE`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from fractions import Fraction
from itertools import count, zip_longest
from math import ceil
from typing import Any

from simpy import Environment, Event
from simpy.events import EventPriority

from moetier.sim.hardware import Link as LinkSpec
from moetier.sim.layout import Layout
from moetier.sim.machine.base import LayerTiming, OnSpan, Span
from moetier.sim.machine.costs import Costs
from moetier.sim.machine.hierarchy import Hierarchy
from moetier.sim.plan import LayerPlan

STEP, DISPATCH, PACE = EventPriority(2), EventPriority(3), EventPriority(4)

Steps = Generator[Event, Any, None]
_Piece = tuple[str, str, int, int]  # of compute: processor, name, when it began and ended


class _Copy:
    """One slice on its way up (or down), over one link after the other."""

    def __init__(
        self,
        env: Environment,
        slice_id: int,
        nbytes: int,
        route: Sequence[_Link],
    ) -> None:
        """Travel over *route*, as a prefetch until it gets a rank."""
        self.slice_id, self.nbytes, self.route = slice_id, nbytes, list(route)
        self.rank: tuple[int, int] | None = None  # of a demand: its batch, and its place there
        self.landed = env.event()  # at the end of the route
        self.landed_at = 0
        self.moved = False  # whether a lane has taken it up, on any link


class _Link:
    """A link as processes: one per lane, and a dispatcher that wakes when something changes."""

    def __init__(self, env: Environment, spec: LinkSpec, on_span: OnSpan | None) -> None:
        """Begin idle, with nothing waiting."""
        self._env, self._spec, self._on_span = env, spec, on_span
        self.demands: list[list[_Copy]] = []  # groups of one batch that asked together
        self.prefetches: list[_Copy] = []
        self._asked = -1, -1  # batch and time of the last group
        self._jobs = [env.event() for _ in range(spec.lanes)]
        self._idle = list(range(spec.lanes))
        self._change = env.event()
        self.turned = env.event()  # when the next copy starts or lands
        self.landed_at = 0  # the last of all
        for lane in range(spec.lanes):
            env.process(self._lane(lane))
        env.process(self._dispatcher())

    def ask(self, copy: _Copy) -> None:
        """Queue *copy*, now: a demand by rank in its group, a prefetch last."""
        if copy.rank is None:
            self.prefetches.append(copy)
        else:
            asked = copy.rank[0], int(self._env.now)
            if self._asked != asked or not self.demands:
                self.demands.append([])
                self._asked = asked
            self.demands[-1].append(copy)
            self.demands[-1].sort(key=lambda item: item.rank or (0, 0))
        self._wake()

    @property
    def busy(self) -> bool:
        """Return whether a copy is in flight."""
        return len(self._idle) < self._spec.lanes

    def _turn(self) -> None:
        if self.turned.callbacks:
            self.turned.succeed()
            self.turned = self._env.event()

    def _wake(self) -> None:
        if not self._change.triggered:
            self._change.succeed()

    def _dispatcher(self) -> Steps:
        while True:
            yield self._change
            yield _after(self._env, 0, DISPATCH)
            self._change = self._env.event()
            while self.demands and self._idle:
                self._give(self.demands[0])
                if not self.demands[0]:
                    del self.demands[0]
            if self.prefetches and self._idle:
                self._give(self.prefetches)

    def _give(self, waiting: list[_Copy]) -> None:
        """Give idle lanes to the first of *waiting*, which count each other and who is busy."""
        lanes = self._idle[: len(waiting)]
        del self._idle[: len(lanes)]
        busy = self._spec.lanes - len(self._idle)
        self._turn()
        for lane in lanes:
            copy = waiting.pop(0)
            copy.moved = True
            self._jobs[lane].succeed((copy, self._spec.copy_ns(copy.nbytes, busy)))

    def _lane(self, lane: int) -> Steps:
        while True:
            copy, took = yield self._jobs[lane]
            start, demanded = int(self._env.now), copy.rank is not None
            self._jobs[lane] = self._env.event()
            yield self._env.timeout(took)
            self.landed_at = int(self._env.now)
            self._idle.append(lane)
            self._idle.sort()
            self._wake()
            self._turn()
            if self._on_span is not None:
                cause = "demand" if demanded else "prefetch"
                info = {"cause": cause, "bytes": copy.nbytes, "slice": copy.slice_id}
                label = f"link {self._spec.src} to {self._spec.dst} lane {lane}"
                self._on_span(Span(label, cause, start, int(self._env.now), info))
            copy.route.remove(self)
            if copy.route:
                copy.route[0].ask(copy)
            else:
                copy.landed_at = int(self._env.now)
                copy.landed.succeed()


class ProcessMachine:
    """A `Machine` whose parts are SimPy processes; slow, and equal to `SimMachine`."""

    def __init__(
        self, hierarchy: Hierarchy, costs: Costs, layout: Layout, on_span: OnSpan | None = None
    ) -> None:
        """Begin idle at time 0; *on_span* hears of what occupies a link or a processor."""
        self.env = Environment()
        self._costs, self._layout, self._on_span = costs, layout, on_span
        self._links = [_Link(self.env, spec, on_span) for spec in hierarchy.links]
        self._down = [_Link(self.env, spec, on_span) for spec in hierarchy.demotion]
        self._names = hierarchy.names
        self._overlap, self._slowdown = hierarchy.overlap, hierarchy.slowdown
        self._under_way: dict[int, _Copy] = {}  # prefetched and not asked for yet
        self._batches = 0
        self._places = count()

    @property
    def now(self) -> int:
        """Return the time in ns."""
        return int(self.env.now)

    def execute(self, plan: LayerPlan) -> LayerTiming:
        """Perform one batch and return when its parts happened."""
        timing: list[LayerTiming] = []
        self.env.run(self.env.process(self._batch(plan, timing)))
        return timing[0]

    def finish(self) -> int:
        """Let what is in flight or queued land; return the time at which all is quiet, in ns."""
        quiet = self.now
        self.env.run()  # to beyond that, where timers are left that nobody waits for any more
        return max([quiet, *[link.landed_at for link in self._links + self._down]])

    def landed(self, slice_id: int) -> bool:
        """Return whether a planned-resident slice has arrived in the fastest tier."""
        copy = self._under_way.get(slice_id)
        return copy is None or copy.landed.triggered

    def queued_bytes(self) -> int:
        """Return the bytes of prefetches that are queued or in flight towards the fastest tier."""
        return sum(c.nbytes for c in self._under_way.values() if not c.landed.triggered)

    def cancel(self, slices: Sequence[int]) -> list[int]:
        """Withdraw the queued prefetches among *slices*; return those that had not started."""
        withdrawn = [s for s in slices if s in self._under_way and not self._under_way[s].moved]
        for s in withdrawn:
            copy = self._under_way.pop(s)
            copy.route[0].prefetches.remove(copy)
        return withdrawn

    def _batch(self, plan: LayerPlan, timing: list[LayerTiming]) -> Steps:
        """Dense part, copies, experts on both processors, eviction."""
        env, start = self.env, self.now
        self._batches += 1
        dropped = self._drop(plan.replaced)
        yield from self._work(self._costs.dense_ns(plan.batch), self._slowdown)
        yield _after(env, 0, STEP)
        asked = self.now
        late = [self._under_way.pop(s) for s in plan.needed if s in self._under_way]
        late = [copy for copy in late if not copy.landed.triggered]
        demanded = [copy for copy in late if self._promote(copy)]
        fetched = self._copies(plan.fetch, plan.fetch_hops, 0)
        for_cpu = self._copies(plan.cpu, plan.cpu_hops or [0] * len(plan.cpu), 1)
        for copy in fetched + for_cpu:
            copy.rank = self._batches, next(self._places)
            copy.route[0].ask(copy)
        for copy in self._copies(plan.prefetch, plan.prefetch_hops, 0):
            self._under_way[copy.slice_id] = copy
            copy.route[0].ask(copy)
        main, cpu = self._costs.expert_ns(plan)
        coming = late + fetched
        computed: list[_Piece] = []
        on_main = env.process(self._experts(plan, coming, main, computed))
        there = env.all_of([copy.landed for copy in coming])
        on_cpu = env.process(self._on_cpu(for_cpu, cpu, computed))
        yield on_main & there & on_cpu if plan.cpu else on_main & there
        yield _after(env, 0, STEP)
        end, landed = self.now, max([asked, *[copy.landed_at for copy in coming]])
        copied = max([asked, *[copy.landed_at for copy in demanded + fetched + for_cpu]])
        dropped += self._drop(plan.evicted)
        for copy in self._copies(plan.demoted, None, 0, self._down):
            copy.rank = self._batches, next(self._places)
            copy.route[0].ask(copy)
        self._show(plan, [("compute", "dense", start, asked), *computed], landed)
        took = sum(done - begin for lane, _, begin, done in computed if lane == "compute")
        wait = end - asked - took
        timing.append(
            LayerTiming(start, asked - start, wait, copied - asked, took, end, len(late), dropped)
        )

    def _drop(self, slices: Sequence[int]) -> int:
        """Give up prefetches that leave the plan; return the bytes that never reach the top.

        One that is already on its last link goes on; one further down stops in the next tier.
        """
        dropped = 0
        for copy in [self._under_way.pop(s) for s in slices if s in self._under_way]:
            link = copy.route[0] if copy.route else None
            if link is None or (link is self._links[0] and copy not in link.prefetches):
                continue
            dropped += copy.nbytes
            if link is self._links[0]:
                link.prefetches.remove(copy)
            else:
                del copy.route[1:]
        return dropped

    def _promote(self, copy: _Copy) -> bool:
        """Make a prefetch a demand where it waits, and on links it has yet to reach.

        False for one that is already on its last link: it only has to arrive.
        """
        link = copy.route[0]
        queued = copy in link.prefetches
        if not queued and len(copy.route) == 1:
            return False
        copy.rank = self._batches, next(self._places)
        if queued:
            link.prefetches.remove(copy)
            link.ask(copy)
        return True

    def _copies(
        self,
        slices: Sequence[int],
        hops: list[int] | None,
        last: int,
        links: list[_Link] | None = None,
    ) -> list[_Copy]:
        """Return a copy for each of *slices* that has to move, over its slowest link first."""
        up = self._links if links is None else links
        pairs = zip_longest(slices, hops or (), fillvalue=1)
        return [
            _Copy(self.env, s, self._layout.nbytes[s], up[last : last + n][::-1])
            for s, n in pairs
            if n
        ]

    def _experts(
        self, plan: LayerPlan, coming: Sequence[_Copy], total: int, computed: list[_Piece]
    ) -> Steps:
        """Compute a batch's experts on the main processor, whichever is there first; note when."""
        waiting = [("experts", list(coming), total)]
        overhead = 0
        if self._overlap:
            overhead, parts = self._costs.per_expert(plan, total)
            waiting = [
                (f"expert {part.expert}", [c for c in coming if c.slice_id in part.slices], part.ns)
                for part in parts
            ]
        while waiting:
            yield _after(self.env, 0, STEP)
            ready = [item for item in waiting if all(copy.landed.triggered for copy in item[1])]
            if not ready:
                missing = [copy.landed for item in waiting for copy in item[1]]
                yield self.env.any_of([event for event in missing if not event.triggered])
                continue
            first = min(ready, key=lambda item: max([copy.landed_at for copy in item[1]] or [0]))
            waiting.remove(first)
            begin = self.now
            yield from self._work(first[2] + overhead, self._slowdown)
            overhead = 0
            computed.append(("compute", first[0], begin, self.now))

    def _on_cpu(self, inputs: Iterable[_Copy], took: int, computed: list[_Piece]) -> Steps:
        """Wait for *inputs*, then compute for *took* ns; note when."""
        yield self.env.all_of([copy.landed for copy in inputs])
        begin = self.now
        yield self.env.timeout(took)
        computed.append(("cpu", "experts", begin, self.now))

    def _work(self, ns: int, slowdown: Fraction) -> Steps:
        """Compute for *ns*, longer by *slowdown* while a copy reaches the fastest tier."""
        if not slowdown:
            yield self.env.timeout(ns)
            return
        link, left = self._links[0], Fraction(ns)
        while left > 0:
            yield _after(self.env, 0, PACE)
            begin, pace = self.now, 1 + slowdown if link.busy else Fraction(1)
            yield self.env.timeout(ceil(left * pace)) | link.turned
            left -= (self.now - begin) / pace

    def _show(self, plan: LayerPlan, pieces: Iterable[_Piece], landed: int) -> None:
        """Tell the observer what processors did in one batch, and how full the fastest tier is."""
        if self._on_span is None:
            return
        where = {"step": plan.batch.step, "layer": plan.batch.layer}
        free = None
        for lane, name, begin, end in pieces:
            if lane == "compute":
                if free is not None and begin > free:
                    self._on_span(Span(lane, "wait", free, begin, where))
                free = end
            if end > begin:
                self._on_span(Span(lane, name, begin, end, where))
        level = {"bytes": plan.resident}
        self._on_span(Span(f"resident in {self._names[0]}", "bytes", landed, landed, level))


def _after(env: Environment, delay: int, priority: EventPriority) -> Event:
    """Return an event that happens *delay* ns from now, after all of higher priority."""
    event = env.event()
    event._ok, event._value = True, None
    env.schedule(event, priority, delay)
    return event
