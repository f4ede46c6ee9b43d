"""This module defines what the planner hands to a machine: one batch of operations per layer."""

from __future__ import annotations

from collections.abc import Sequence

from moetier.traces.batch import LayerBatch


class LayerPlan:
    """The operations of one batch, in the order a machine performs them.

    After the dense part the machine copies `fetch` to the fastest tier and queues `prefetch` behind
    it, runs `cpu` where it is, waits for what is needed, computes, and forgets `evicted`. A *hop*
    count of 2 means that the slice also has to come up from the tier below the second one; None
    means 1 for all. Every list holds unique slices in order.

    What most batches do not have is a class attribute that an instance overrides: filling in two
    dozen fields for every batch took a fifth of a run.
    """

    cpu: Sequence[int] = ()
    skip: Sequence[int] = ()
    degrade: Sequence[int] = ()  # missing parts that compute does without
    prefetch: Sequence[int] = ()
    evicted: Sequence[int] = ()  # from the fastest tier, at the end of the batch
    replaced: Sequence[int] = ()  # taken out by warm-up, before this batch
    demoted: Sequence[int] = ()  # exclusive tiers: evicted slices that are copied down
    cancelled: Sequence[int] = ()  # queued prefetches withdrawn before this batch
    fetch_hops: list[int] | None = None
    cpu_hops: list[int] | None = None
    prefetch_hops: list[int] | None = None
    cancelled_hops: list[int] | None = None
    compulsory: int = 0  # misses of slices that were never resident before
    prefetch_used: int = 0  # slices brought early and used for the first time in this batch
    prefetch_wasted: int = 0  # bytes brought early and evicted unused by this batch
    cpu_assignments: int = 0  # (token, expert) pairs that the CPU computes
    skip_assignments: int = 0  # and those that nobody computes
    spared: int = 0  # bytes of what is needed that compute does not read, as channels left out
    lower_lookups: int = 0  # of the second tier, by this batch's demands
    lower_hits: int = 0
    warmup_bytes: int = 0  # brought by warm-up before this batch, not charged to time
    early: bool = False  # has it any prefetches, or news of earlier ones?
    rare: bool = False  # has it more than these and needed, missing, fetch and evicted?
    resident: int = 0  # bytes planned in the fastest tier after the batch
    peak: int = 0  # most bytes planned there during the batch

    def __init__(self, batch: LayerBatch, needed: list[int], missing: list[int]) -> None:
        """Plan *batch* as it will be computed, which uses *needed* and has to do without *missing*.

        *missing* is what was not planned to be in the fastest tier; all of it is fetched unless
        `fetch` is replaced.
        """
        self.batch, self.needed, self.missing, self.fetch = batch, needed, missing, missing
