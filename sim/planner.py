"""This module owns the loop over batches and every invariant; policies only fill the holes.

Residency here is *planned*: a slice counts as resident from the moment its copy is ordered.
Decisions thus never depend on timing, unless a policy asks the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from moetier.sim.future import Future
from moetier.sim.layout import Layout
from moetier.sim.plan import LayerPlan
from moetier.sim.policy.base import (
    Context,
    Estimates,
    Eviction,
    Lateness,
    Miss,
    Part,
    Precision,
    Prefetch,
    Progress,
    Routing,
)
from moetier.sim.policy.compose import Policy
from moetier.sim.residency import Cache
from moetier.traces.batch import DECODE, PREFILL, LayerBatch
from moetier.traces.gating import GateRule

OnPlan = Callable[[LayerPlan], None]


class Planner:
    """Turn batches into plans under one policy; a live model calls `step` layer by layer.

    *capacities* holds the budget in bytes of each cached tier, fastest first; the tier below the
    last holds everything. With *exclusive* a slice lives in one cached tier only.
    """

    def __init__(
        self,
        policy: Policy,
        layout: Layout,
        capacities: Sequence[int],
        *,
        exclusive: bool = False,
        seed: int = 0,
        future: Future | None = None,
        popularity: Sequence[int] | None = None,
        lateness: Lateness | None = None,
        gate: GateRule | None = None,
        estimates: Estimates | None = None,
        on_plan: OnPlan | None = None,
    ) -> None:
        """Start a run; nothing is resident until warm-up says so."""
        self.policy, self.layout, self.exclusive = policy, layout, exclusive
        self._on_plan, self._lateness = on_plan, lateness
        self._progress = Progress()
        self.caches = [
            Cache(layout, capacity, eviction)
            for capacity, eviction in zip(capacities, policy.eviction, strict=True)
        ]
        self._top, self._lower = self.caches[0], self.caches[1] if len(self.caches) > 1 else None
        seeds = iter(np.random.SeedSequence(seed).spawn(len(policy.parts)))

        def start(part: Part, cache: Cache) -> None:
            part.start(
                Context(
                    layout=layout,
                    capacity=cache.capacity,
                    resident=cache.resident,
                    rng=np.random.default_rng(next(seeds)),
                    progress=self._progress,
                    future=future if part.needs_future else None,
                    popularity=popularity,
                    lateness=lateness if part.asks_lateness else None,
                    gate=gate,
                    estimates=estimates,
                )
            )

        for part in policy.shared_parts:
            start(part, self._top)
        for cache in self.caches:
            start(cache.eviction, cache)
        self._fresh = set(range(len(layout.nbytes)))  # never resident in the fastest tier so far
        self._early: set[int] = set()  # brought by a prefetch and not used yet
        self._ahead: list[list[int]] = [[] for _ in range(layout.n_layers)]  # brought for a layer
        self._pinned: set[int] = set()  # all of these, until their layer has run
        self._pinned_bytes = 0
        self._deep: set[int] = set()  # prefetched from below the second tier
        # A hook that is not overridden need not be called (a tenth of a run's time, together).
        self._routes = type(policy.routing).route is not Routing.route
        self._narrows = type(policy.precision).narrow is not Precision.narrow
        self._spares = type(policy.precision).spared is not Precision.spared
        counting = [part for part in policy.parts if part.counts_demand]
        self._counts = bool(counting)
        self._counting = False  # in decode, if they do
        self._uncounted = max([part.uncounted_steps for part in counting], default=0)
        self._predicts = policy.uses_predictions
        self._observes = self._predicts and type(policy.routing).observe is not Routing.observe
        self._prefetches = type(policy.prefetch).candidates is not Prefetch.candidates
        self._resolves = type(policy.miss).resolve is not Miss.resolve
        self._releases = type(self._top.eviction).release is not Eviction.release
        self._whole = type(policy.precision).needed is Precision.needed
        self._layer_slices = layout.layer_slices
        self._needed, self._touch = policy.precision.needed, self._top.eviction.touch
        self._alters = self._routes or self._narrows or self._predicts  # the batch, before it runs
        self._closes = True  # is there anything to do once a batch is decided?
        self._last_phase: int | None = None
        self._warmup_bytes = 0
        self._replaced: list[int] = []
        self._counted_step = -1

    def step(self, batch: LayerBatch) -> LayerPlan:
        """Decide one batch; the plan is final when it is returned."""
        top = self._top
        self._progress.batch += 1
        if batch.phase != self._last_phase:
            self._phase_begins(batch.phase)
        if self._alters:
            if self._routes:
                batch = self.policy.routing.route(batch)
            if self._narrows:
                batch = self.policy.precision.narrow(batch)
            if self._predicts and batch.predict is not None:
                batch.predicted = batch.predict(batch)
            if self._observes:
                self.policy.routing.observe(batch)
        if self._whole:
            base = batch.layer * self._layer_slices
            needed = recency = [base + expert for expert in batch.experts]
        else:
            needed = recency = self._needed(batch)
        if batch.n_tokens != 1:  # fetched in order of first use, remembered in order of last use
            recency = list(dict.fromkeys(reversed(needed)))[::-1]
            needed = list(dict.fromkeys(needed))
        if self._counting:
            self._count(batch, needed)
        cancelled = self._expire(batch.layer, needed) if self._pinned else ()
        resident = top.resident
        missing = [s for s in needed if s not in resident]
        plan = LayerPlan(batch, needed, missing)
        if cancelled:
            plan.rare, plan.cancelled = True, cancelled
            if self._lower is not None:
                plan.cancelled_hops = [2 if s in self._deep else 1 for s in cancelled]
        if missing:
            if not self._fresh.isdisjoint(missing):
                fresh = self._fresh.intersection(missing)
                plan.compulsory = len(fresh)
                self._fresh -= fresh
            if self._resolves:
                recency = self._resolve(plan, recency)
            if self._lower is not None:
                plan.rare = True
                self._climb(plan)
            if plan.fetch:
                top.insert(plan.fetch)
                if self._counting:
                    self._progress.fetches += len(plan.fetch)
                    self._progress.fetch_bytes += self.layout.size(plan.fetch)
        if self._early and not self._early.isdisjoint(needed):
            used = self._early.intersection(needed)
            plan.early, plan.prefetch_used = True, len(used)
            self._early -= used
        self._touch(recency)
        plan.peak = top.used
        evicted = top.release(needed, self._pinned) if self._releases else []
        if top.used > top.capacity:
            evicted += top.trim(self._pinned.union(recency))
            if self._pinned and top.used > top.capacity:
                evicted += self._give_way(recency)
        if self._prefetches:
            evicted = self._prefetch(plan, recency, evicted)
        if evicted:
            plan.evicted = evicted
            if self.exclusive or (self._early and not self._early.isdisjoint(evicted)):
                self._leave(plan, evicted)
        plan.resident = top.used
        if self._closes:
            self._close(plan, recency)
        return plan

    def _close(self, plan: LayerPlan, active: list[int]) -> None:
        """Do what few batches ask for once a *plan* is made; *active* is what it computes here."""
        batch = plan.batch
        if self._spares:
            plan.rare, plan.spared = True, self.policy.precision.spared(batch, active)
        if batch.phase == PREFILL:
            self.policy.warmup.observe(batch, plan.needed)
        if self._warmup_bytes or self._replaced:
            plan.rare = True
            plan.warmup_bytes, self._warmup_bytes = self._warmup_bytes, 0
            plan.replaced, self._replaced = self._replaced, []
        if self._on_plan is not None:
            self._on_plan(plan)
        self._closes = self._spares or batch.phase == PREFILL or self._on_plan is not None

    def _count(self, batch: LayerBatch, needed: list[int]) -> None:
        """Keep the counts of decode that a policy reads."""
        progress = self._progress
        if batch.step != self._counted_step:
            self._counted_step = batch.step
            if progress.decode_steps == self._uncounted:
                counts = progress.lookups, progress.lookup_bytes
                progress.uncounted = *counts, progress.fetches, progress.fetch_bytes
            progress.decode_steps += 1
        progress.lookups += len(needed)
        progress.lookup_bytes += self.layout.size(needed)

    def _resolve(self, plan: LayerPlan, recency: list[int]) -> list[int]:
        """Let the policy sort what is missing; return the *recency* of what is computed here."""
        fetch, cpu, skip, degrade = self.policy.miss.resolve(plan.missing, plan.batch)
        if sorted([*fetch, *cpu, *skip, *degrade]) != sorted(plan.missing):
            raise RuntimeError(
                f"{type(self.policy.miss).__name__} must put each of {plan.missing} in one list, "
                f"got fetch {fetch}, cpu {cpu}, skip {skip}, degrade {degrade}"
            )
        plan.fetch, plan.cpu, plan.skip, plan.degrade = fetch, cpu, skip, degrade
        if not cpu and not skip and not degrade:
            return recency
        plan.rare = True
        plan.cpu_assignments = self._assignments(plan.batch, cpu)
        plan.skip_assignments = self._assignments(plan.batch, skip)
        away = {*cpu, *skip, *degrade}
        return [s for s in recency if s not in away]

    def _climb(self, plan: LayerPlan) -> None:
        """Look what is fetched, or computed by the CPU, up in the second tier."""
        if plan.fetch:
            plan.fetch_hops = self._bring_up(plan, plan.fetch)
        if plan.cpu:
            plan.cpu_hops = [hops - 1 for hops in self._bring_up(plan, plan.cpu, stay=True)]

    def _bring_up(self, plan: LayerPlan, slices: Sequence[int], stay: bool = False) -> list[int]:
        """Look *slices* up in the second tier and plan them there; return the hops of each."""
        lower = self._lower
        assert lower is not None
        absent = [s for s in slices if s not in lower.resident]
        plan.lower_lookups += len(slices)
        plan.lower_hits += len(slices) - len(absent)
        hops = [1 if s in lower.resident else 2 for s in slices]
        if self.exclusive and not stay:  # it moves through, and up
            lower.remove([s for s in slices if s in lower.resident])
        else:
            lower.insert(absent)
            lower.eviction.touch(slices)
            lower.trim(set(slices))
        return hops

    def _give_way(self, active: list[int]) -> list[int]:
        """Evict what was brought early, as the *active* slices of a large batch need its room."""
        left = self._top.trim(set(active))
        gone = self._pinned.intersection(left)
        self._pinned -= gone
        self._pinned_bytes -= self.layout.size(gone)
        self._ahead = [[s for s in ahead if s not in gone] for ahead in self._ahead]
        return left

    def _prefetch(self, plan: LayerPlan, active: list[int], evicted: list[int]) -> list[int]:
        """Admit what is wanted early and fits beside the batch; return all who have to leave.

        What the batch has just *evicted* is still there when it is wanted again: it stays for free.
        """
        self._progress.ahead_bytes = self._pinned_bytes
        candidates = self.policy.prefetch.candidates(plan.batch, plan.needed)
        if not candidates:
            return evicted
        top = self._top
        resident = top.resident
        wanted = [s for s in candidates if s not in resident]
        if not wanted:
            return evicted
        if len(wanted) > 1:
            wanted = list(dict.fromkeys(wanted))
        size = self.layout.size
        room = top.capacity - self._pinned_bytes - size(active)
        admitted, nbytes = wanted, size(wanted)
        if nbytes > room and not top.eviction.ignores_capacity:
            admitted = list(self._fitting(wanted, room))
            nbytes = size(admitted)
        if not admitted:
            return evicted
        slices, ahead = self._layer_slices, self._ahead
        for s in admitted:
            ahead[s // slices].append(s)
        self._pinned.update(admitted)
        self._pinned_bytes += nbytes
        top.insert(admitted)
        if evicted and not resident.isdisjoint(evicted):  # some are back
            spared = set(admitted).intersection(evicted)
            evicted = [s for s in evicted if s not in spared]
            admitted = [s for s in admitted if s not in spared]
        self._bring(plan, admitted)
        if top.used > plan.peak:
            plan.peak = top.used
        if top.used > top.capacity:
            evicted += top.trim(self._pinned.union(active))
        return evicted

    def _bring(self, plan: LayerPlan, admitted: list[int]) -> None:
        """Book the copies of what was *admitted* early."""
        self._fresh.difference_update(admitted)
        if self._lower is not None and admitted:
            plan.rare = True
            uncounted = LayerPlan(plan.batch, [], [])
            hops = plan.prefetch_hops = self._bring_up(uncounted, admitted)
            for s, n in zip(admitted, hops, strict=True):
                (self._deep.add if n > 1 else self._deep.discard)(s)
        self._early.update(admitted)
        plan.early, plan.prefetch = True, admitted

    def _fitting(self, wanted: list[int], room: int) -> Iterator[int]:
        """Yield *wanted* slices, the first ones first, until one does not fit in *room* bytes."""
        for s in wanted:
            room -= self.layout.nbytes[s]
            if room < 0:
                return
            yield s

    def _expire(self, layer: int, needed: list[int]) -> Sequence[int]:
        """Unpin what was brought early for *layer*, which runs now; return what was withdrawn."""
        arrived, self._ahead[layer] = self._ahead[layer], []
        self._pinned.difference_update(arrived)
        self._pinned_bytes -= self.layout.size(arrived)
        if not self.policy.prefetch.cancel or self._lateness is None:
            return ()
        wanted = set(needed)
        unused = [s for s in arrived if s in self._early and s not in wanted]
        withdrawn = self._lateness.cancel(unused)
        self._top.remove(withdrawn)
        self._early.difference_update(withdrawn)
        if self._lower is not None:
            self._stay_below(withdrawn)
        return withdrawn

    def _stay_below(self, withdrawn: list[int]) -> None:
        """Undo in the second tier what the prefetches that were *withdrawn* had planned there."""
        lower = self._lower
        assert lower is not None
        deep = [s for s in withdrawn if s in self._deep]
        lower.remove([s for s in deep if s in lower.resident])
        if self.exclusive:  # the others never left it
            lower.insert([s for s in withdrawn if s not in self._deep])
            lower.trim(frozenset())

    def _leave(self, plan: LayerPlan, evicted: list[int]) -> None:
        """Book what leaves the fastest tier: wasted prefetches, demotion to the tier below."""
        wasted = self._early.intersection(evicted)
        if wasted:
            plan.early, plan.prefetch_wasted = True, self.layout.size(wasted)
            self._early -= wasted
        if self.exclusive and self._lower is not None:
            self._lower.insert(evicted)
            self._lower.eviction.touch(evicted)
            self._lower.trim(frozenset())
            plan.rare = True
            plan.demoted = [s for s in evicted if s in self._lower.resident]

    def _phase_begins(self, phase: int) -> None:
        """Let warm-up set the scene before the first batch, and where decode follows prefill."""
        wanted: Sequence[int] | None = None
        if self._last_phase is None:
            wanted = self.policy.warmup.initial()
        if phase == DECODE:
            at_decode = self.policy.warmup.decode_begins()
            wanted = wanted if at_decode is None else at_decode
        self._last_phase, self._closes = phase, True
        self._counting = self._counts and phase == DECODE
        if wanted is None:
            return
        size = self.layout.size(wanted)
        if size > self._top.capacity and not self._top.eviction.ignores_capacity:
            raise RuntimeError(
                f"{type(self.policy.warmup).__name__} wants {size} bytes resident, "
                f"more than the capacity of {self._top.capacity}"
            )
        for ahead in self._ahead:
            ahead.clear()
        self._pinned.clear()
        self._pinned_bytes = 0
        self._replaced, came = self._top.replace(wanted)
        self._early.intersection_update(self._top.resident)
        self._fresh.difference_update(came)
        if self._lower is not None and self.exclusive:
            self._lower.remove([s for s in came if s in self._lower.resident])
        self._warmup_bytes += self.layout.size(came)

    def _assignments(self, batch: LayerBatch, slices: Sequence[int]) -> int:
        """Return how many (token, expert) pairs of *batch* the experts of *slices* stand for."""
        experts = {self.layout.expert_of(s) for s in slices}
        return sum(expert in experts for expert in batch.experts)
