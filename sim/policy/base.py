"""This module is the contract of a policy: six seams, each with a do-nothing default.

A part of a policy is pure: it sees ids, scores and residency, and returns ids. It owns no clock, no
global randomness and no residency; the planner calls it once per batch with whole batches of
slices, checks every invariant and does the moving. The order of the calls for one batch is

    routing.route -> precision.narrow -> routing.observe -> precision.needed -> miss.resolve
    -> eviction.insert (what will be fetched) -> eviction.touch (all that is used)
    -> eviction.release -> eviction.victims (if over capacity) -> prefetch.candidates
    -> eviction.insert (what was admitted) -> eviction.victims -> precision.spared

where what is released or evicted leaves once the batch has computed. `warmup` is asked before the
first batch and again when decode begins.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from moetier.sim.future import Future
from moetier.sim.layout import Layout
from moetier.traces.batch import Bools, LayerBatch
from moetier.traces.gating import GateRule
from moetier.traces.geometry import Geometry


class Lateness(Protocol):
    """What a policy may ask the machine. Who asks has no fixed decision log."""

    def landed(self, slice_id: int) -> bool:
        """Return whether a planned-resident slice has arrived in the fastest tier."""
        ...

    def queued_bytes(self) -> int:
        """Return the bytes of prefetches that are queued or in flight towards the fastest tier."""
        ...

    def cancel(self, slices: Sequence[int]) -> list[int]:
        """Withdraw the queued prefetches among *slices*; return those that had not started."""
        ...


class Estimates(Protocol):
    """What the machine's description says in advance; asking it is not asking about lateness."""

    def window_ns(self, batch: LayerBatch, needed: Sequence[int], horizon: int) -> int:
        """Return the compute time from now until the experts *horizon* layers later begin.

        Now is the end of the dense part of *batch*, which uses *needed*.
        """
        ...

    def copy_ns(self, nbytes: int) -> int:
        """Return what one transfer into the fastest tier adds to a busy link's time."""
        ...


@dataclass(slots=True)
class Progress:
    """Where a run is, as the planner sees it.

    What was looked up and fetched on demand in decode is counted for a policy that `counts_demand`,
    the current batch's look-ups included, its fetches not yet.
    """

    batch: int = -1  # index of the current batch, from 0
    ahead_bytes: int = 0  # brought early for layers that have not run yet
    decode_steps: int = 0  # begun
    lookups: int = 0
    lookup_bytes: int = 0
    fetches: int = 0
    fetch_bytes: int = 0
    uncounted: tuple[int, int, int, int] = 0, 0, 0, 0
    # of the first decode steps alone, as many as the most `uncounted_steps` of a part


class ExpertFormat(NamedTuple):
    """How an expert's weights are computed: as stored, or from codes of *bits* bits.

    Codes come in groups of *group* along the input, with a scale and a zero-point. With *inside*
    they are the highest bits of codes of so many bits, and so are the zero-points.
    """

    bits: int | None = None
    inside: int | None = None
    group: int = 32


@dataclass(frozen=True, slots=True)
class Context:
    """What a part of a policy may look at, given once by `start`.

    `resident` is a live, read-only view of the planned residency of the part's tier: slices in
    flight count. `progress` is shared with the planner. `capacity` is that tier's budget in bytes.
    `future` is None unless the part declared `needs_future`; `popularity` holds a count per slice
    where a profile was given.
    """

    layout: Layout
    capacity: int
    resident: Collection[int]
    rng: np.random.Generator
    progress: Progress = field(default_factory=Progress)
    future: Future | None = None
    popularity: Sequence[int] | None = None
    lateness: Lateness | None = None
    gate: GateRule | None = None
    estimates: Estimates | None = None


class Part:
    """What all seams share: flags, and `start`, called once before the first batch of a run."""

    alters_output: bool = False  # lossy: the model computes something else
    needs_future: bool = False  # an oracle; refused on a live source
    asks_lateness: bool = False  # asks `Context.lateness`, so decisions depend on timing
    needs_popularity: bool = False  # asks for the counts of a profile trace
    uses_predictions: bool = False  # reads `LayerBatch.predicted`
    needs_scores: bool = False  # reads `LayerBatch.scores`
    needs_weights: bool = False  # reads `LayerBatch.weights`
    needs_bit_slices: bool = False  # makes sense only where experts have an MSB and an LSB slice
    counts_demand: bool = False  # reads the counts of `Progress`
    uncounted_steps: int = 0  # decode steps whose counts `Progress.uncounted` shall hold
    follows_cache: bool = False  # what a batch uses depends on what is cached: nobody foresees it
    draws: bool = False  # on a trace, what a batch uses is drawn: nobody foresees it
    assumption: str | None = None  # what it takes for granted on a trace, in a sentence
    predictor: str | None = None  # whose predictions, by name; None: whatever there is
    horizons: Sequence[int] = ()  # how many layers ahead

    context: Context

    def start(self, context: Context) -> None:
        """Begin a run; forget everything of an earlier one."""
        self.context = context


class Routing(Part):
    """Which experts run, with what weights?"""

    replaces_router: bool = False  # in decode, the router is not run after the first layer

    def observe(self, batch: LayerBatch) -> None:
        """Take note of a batch as it is computed, with its predictions; only if it uses them."""

    def route(self, batch: LayerBatch) -> LayerBatch:
        """Return the batch as it will be computed; the default changes nothing."""
        return batch


class Precision(Part):
    """Which slices of each expert does each token need?

    `formats` are the ways an expert may be computed; `levels` chooses among them by index. `kernel`
    names the code that computes them, under which a calibrated profile has its times.
    """

    formats: Sequence[ExpertFormat] = (ExpertFormat(),)
    kernel: str = "whole"
    where_sketches_are: bool = False  # only the processor of the fastest tier can compute it

    def layout(self, expert_bytes: Sequence[int], geometry: Geometry) -> Layout:
        """Return the slices of a model whose whole experts take *expert_bytes*, per MoE layer."""
        return Layout([[size] for size in expert_bytes], geometry.n_experts)

    def needed(self, batch: LayerBatch) -> list[int]:
        """Return the slices of every token's experts in access order, repeats included."""
        base = batch.layer * self.context.layout.layer_slices
        return [base + expert for expert in batch.experts]

    def beside(self, geometry: Geometry) -> int:
        """Return the bytes that must stay in the fastest tier beside the expert cache."""
        return 0

    def narrow(self, batch: LayerBatch) -> LayerBatch:
        """Return the batch without the entries that are not worth computing at any precision."""
        return batch

    def levels(self, batch: LayerBatch, degraded: Collection[int]) -> list[int] | None:
        """Return the index in `formats` that computes each entry of `batch.experts`.

        *degraded* are the slices that compute has to do without. None stands for the first format
        throughout.
        """
        return None

    def channels(self, batch: LayerBatch) -> Bools | None:
        """Return which channels each entry of *batch* keeps, (entries, channels); None for all."""
        return None

    def spared(self, batch: LayerBatch, used: Sequence[int]) -> int:
        """Return how many bytes of the slices *used* the main processor does not read.

        They are those of *batch* that it computes with, unique. May be negative: what it reads
        beside them, such as a sketch, counts too.
        """
        return 0


class Missed(NamedTuple):
    """What to do with the missing slices of a batch; every one is in exactly one of the lists.

    Experts whose slice is in `degrade` are computed without it, at a lower level.
    """

    fetch: list[int]
    cpu: Sequence[int] = ()
    skip: Sequence[int] = ()
    degrade: Sequence[int] = ()


class Miss(Part):
    """The slice is not here: what now?"""

    computes_below: bool = False  # needs a processor on the second tier
    renormalise: bool = False  # of a skipped expert's token: scale the remaining weights up

    def resolve(self, missing: list[int], batch: LayerBatch) -> Missed:
        """Sort the *missing* slices, given in access order; the default fetches all."""
        return Missed(missing)


class Prefetch(Part):
    """What to bring early, in what order, how much?"""

    cancel: bool = False  # withdraw queued prefetches once their layer has run without them

    def candidates(self, batch: LayerBatch, needed: list[int]) -> Sequence[int]:
        """Return slices to bring, most wanted first, now that the router of *batch* has spoken.

        *needed* holds the unique slices of the batch. The planner drops candidates that are
        resident or on their way, and those that do not fit beside the batch and earlier prefetches.
        """
        return ()


class Eviction(Part):
    """Who leaves? The one seam without a default: a cache needs an order."""

    ignores_capacity: bool = False  # keeps a fixed number of buffers instead of a budget

    def insert(self, slices: Sequence[int]) -> None:
        """Take note of *slices* that become resident; demanded ones are touched right after."""
        raise NotImplementedError

    def touch(self, slices: Sequence[int]) -> None:
        """Take note of the resident *slices* a batch uses: unique, ordered by their last use."""

    def victims(self, needed_bytes: int, pinned: Collection[int]) -> list[int]:
        """Return, and forget, slices worth at least *needed_bytes*, none of them *pinned*.

        Return all that is not pinned when that is not enough.
        """
        raise NotImplementedError

    def release(self, needed: Sequence[int], pinned: Collection[int]) -> list[int]:
        """Return, and forget, slices not worth keeping now that a batch that used *needed* is done.

        None of them may be *pinned*: brought early for a batch to come.
        """
        return []

    def forget(self, slices: Sequence[int]) -> None:
        """Take note that *slices* left for another reason."""
        raise NotImplementedError


class Warmup(Part):
    """What is resident when decode begins?"""

    def initial(self) -> Sequence[int] | None:
        """Return what is resident before the first batch, least valuable first, or None."""
        return None

    def observe(self, batch: LayerBatch, needed: Sequence[int]) -> None:
        """Take note of a prefill *batch* and of its unique slices, in access order."""

    def decode_begins(self) -> Sequence[int] | None:
        """Return what stays or comes, least valuable first; None leaves what prefill left."""
        return None
