"""This module predicts what recorded runs took: I/O, stall and wall, token by token.

Bytes come from replaying the recorded routing under the run's cache where that routing has the
run's experts per token; else the run's own bytes per token are given, as misses drawn over the
look-ups of a token, each equally likely. Levels of compute and of cache management, the medians
over the last two thirds of a run, are given too, because a phone's clock changes from run to run;
beside it stands what the profile says without them. Nothing else of a run is used.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from moetier.sim.hardware import Profile
from moetier.sim.layout import Layout
from moetier.sim.machine.base import OnSpan
from moetier.sim.machine.costs import Costs
from moetier.sim.machine.hierarchy import Hierarchy
from moetier.sim.plan import LayerPlan
from moetier.sim.run import Setting, simulate
from moetier.traces.errors import InputError
from moetier.traces.importers.bigmoeonedge import import_bigmoeonedge
from moetier.traces.io import ArrayTrace, TraceReader
from moetier.traces.schema import Header
from moetier.validate.phone.model import (
    MIB,
    MS,
    Ints,
    at_level,
    batch_of,
    costs_of,
    experts_read,
    hierarchy_of,
    layout_of,
    spread,
    with_lanes,
)
from moetier.validate.phone.reads import READS, ReadMachine, Token
from moetier.validate.phone.runs import Run, Values, last_two_thirds, middle, read_runs

QUANTITIES = ("io", "stall", "wall")


@dataclass(frozen=True)
class Levels:
    """Milliseconds per token: of compute, and of cache management."""

    compute_ms: float
    mgmt_ms: float


@dataclass(frozen=True)
class Figures:
    """Milliseconds per token, medians over the last two thirds of a run."""

    io: float
    stall: float
    wall: float


@dataclass(frozen=True)
class Comparison:
    """One run: what was measured, and predicted with the run's levels and with the profile's own.

    *error* is predicted ÷ measured - 1 of these medians, None where nothing was measured.
    *given_bytes* is the prediction from the run's own bytes per token, which for a traced run
    tells the error in bytes from that in time; *token_error* is the median over its tokens of the
    size of the error on wall, each against its own token. *level_error* is that on wall if stall
    were predicted exactly: medians do not add up, and a level is one number.
    """

    run: str
    top_k: int
    cache_mib: int
    lanes: int
    overlap: bool
    bytes_from: str  # "trace" or "run"
    tokens: int  # measured, in the last two thirds
    given: Levels
    read_mib: dict[str, float]  # per token: measured, predicted
    measured: Figures
    predicted: Figures
    own: Figures
    given_bytes: Figures
    error: dict[str, float | None]
    token_error: float
    level_error: float
    own_error: float  # on wall, without the levels
    compute_spread: float  # 90th ÷ 10th percentile of the run's compute_ms
    major_faults: float | None  # per token, median
    cpu_correlation: float | None  # of compute_ms with CPU time, over tokens


def open_routing(folder: Path) -> ArrayTrace:
    """Return the recorded routing of *folder*; raise `InputError` where it cannot be read."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "route.parquet"
        import_bigmoeonedge(Path(folder) / "route.csv", out)
        return ArrayTrace.of(TraceReader(out))


def predict(folder: Path, profile: Profile, reads: int = READS, seed: int = 0) -> list[Comparison]:
    """Predict the overlapped runs under *folder*, and those whose routing was recorded.

    *reads* is the number of reads an expert takes, *seed* that of drawn misses.

    Raises:
        InputError: If *folder* has no such runs, or no `route.csv`, which also gives the model.
    """
    routing = open_routing(folder)
    chosen = [run for run in read_runs(folder) if run.overlap or _covers(routing, run)]
    if not chosen:
        raise InputError(
            "no run overlaps reads and compute, or has the routing's experts per token",
            where=os.fspath(folder),
            way_out="add such runs",
        )
    return [compare(run, routing, profile, reads, seed) for run in chosen]


def compare(
    run: Run, routing: ArrayTrace, profile: Profile, reads: int = READS, seed: int = 0
) -> Comparison:
    """Predict one *run* and set it beside what was measured."""
    traced = _covers(routing, run)
    given = Levels(run.level("compute_ms"), run.level("mgmt_ms"))
    base = with_lanes(profile, run.lanes)
    level = at_level(routing.header, base, run.top_k, middle(run), given.compute_ms, given.mgmt_ms)
    take = _replay if traced else _drawn
    tokens = take(run, routing, level, reads, seed)
    own = figures(run, take(run, routing, base, reads, seed))
    predicted, measured = figures(run, tokens), recorded(run)
    paired = _drawn(run, routing, level, reads, seed) if traced else tokens
    return Comparison(
        run=run.name,
        top_k=run.top_k,
        cache_mib=run.cache_mib,
        lanes=run.lanes,
        overlap=run.overlap,
        bytes_from="trace" if traced else "run",
        tokens=len(run.warm("wall_ms")),
        given=given,
        read_mib={
            "measured": run.level("read_bytes") / MIB,
            "predicted": float(np.median(_warm(tokens, "nbytes"))) / MIB,
        },
        measured=measured,
        predicted=predicted,
        own=own,
        given_bytes=figures(run, paired),
        error={q: _error(getattr(predicted, q), getattr(measured, q)) for q in QUANTITIES},
        token_error=float(np.median(np.abs(_warm(paired, "wall") / MS / run.warm("wall_ms") - 1))),
        level_error=(given.compute_ms + given.mgmt_ms + _waited(run, measured)) / measured.wall - 1,
        own_error=own.wall / measured.wall - 1,
        compute_spread=float(np.divide(*np.quantile(run.warm("compute_ms"), [0.9, 0.1]))),
        major_faults=run.level("majflt") if "majflt" in run.columns else None,
        cpu_correlation=_correlation(run, "compute_ms", "cpu_ms"),
    )


def recorded(run: Run) -> Figures:
    """Return what *run* measured."""
    return Figures(run.level("io_ms"), run.level("stall_ms"), run.level("wall_ms"))


def figures(run: Run, tokens: Sequence[Token]) -> Figures:
    """Return the medians of *tokens* in the terms of *run*; without overlap nothing stalls."""

    def of(name: str) -> float:
        return float(np.median(_warm(tokens, name))) / MS

    if run.overlap:
        return Figures(of("lanes"), of("wait"), of("wall"))
    return Figures(of("copy"), 0.0, of("wall"))


def _correlation(run: Run, one: str, other: str) -> float | None:
    """Return Pearson's correlation of two columns over the last two thirds, where it is defined."""
    if not {one, other} <= run.columns.keys():
        return None
    first, second = run.warm(one), run.warm(other)
    if not first.std() or not second.std():
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _waited(run: Run, measured: Figures) -> float:
    return measured.stall if run.overlap else measured.io


def summary(found: Sequence[Comparison]) -> dict[str, float | None]:
    """Return, over the runs, the median size of each error and the largest on wall."""
    sizes = {q: [abs(e) for c in found if (e := c.error[q]) is not None] for q in QUANTITIES}
    return {
        **{f"median_{q}_error": median(sizes[q]) if sizes[q] else None for q in QUANTITIES},
        "worst_wall_error": max(sizes["wall"]),
        "median_token_error": median(c.token_error for c in found),
        "median_own_wall_error": median(abs(c.own_error) for c in found),
    }


def as_dict(found: Sequence[Comparison], profile: Profile, bar: float) -> dict[str, object]:
    """Return everything *found*, ready for JSON; *above* names the runs above the *bar*."""
    return {
        "profile": profile.name,
        "bar": bar,
        "runs": [asdict(c) for c in found],
        "overall": summary(found),
        "met": met(found, bar),
        "above": above(found, bar),
    }


def met(found: Sequence[Comparison], bar: float) -> bool:
    """Return whether the median over runs of the size of the error on wall is at most *bar*."""
    return median(abs(c.error["wall"] or 0.0) for c in found) <= bar


def above(found: Sequence[Comparison], bar: float) -> list[str]:
    """Return the names of the runs whose error on wall is above *bar*."""
    return [c.run for c in found if abs(c.error["wall"] or 0.0) > bar]


def _warm(tokens: Sequence[Token], name: str) -> Values:
    """Return field *name* over the last two thirds of *tokens*."""
    return last_two_thirds(np.array([getattr(token, name) for token in tokens], np.float64))


def _error(predicted: float, measured: float) -> float | None:
    return predicted / measured - 1 if measured else None


def _covers(routing: ArrayTrace, run: Run) -> bool:
    return run.cache_mib > 0 and routing.header.geometry.top_k == run.top_k


def _replay(run: Run, routing: ArrayTrace, profile: Profile, reads: int, seed: int) -> list[Token]:
    """Return the decoded tokens of *routing* under the cache of *run*."""
    made: list[ReadMachine] = []

    def machine(
        hierarchy: Hierarchy, costs: Costs, layout: Layout, on_span: OnSpan | None
    ) -> ReadMachine:
        made.append(ReadMachine(hierarchy, costs, layout, on_span, reads))
        return made[-1]

    fast = profile.main_compute.tier
    setting = Setting(
        profile,
        {"eviction": run.eviction},
        {fast: run.cache_mib * MIB},
        tiers=list(hierarchy_of(profile, run.overlap).names),
        overlap=run.overlap,
        seed=seed,
    )
    simulate(routing, setting, machine=machine)
    return made[0].tokens


def _drawn(run: Run, routing: ArrayTrace, profile: Profile, reads: int, seed: int) -> list[Token]:
    """Return the tokens of *run* from its bytes per token."""
    header = routing.header
    layout = layout_of(header)
    machine = read_machine(header, profile, run.overlap, reads)
    counts = misses_of(run, header, reads, seed)
    for step, row in enumerate(counts.tolist()):
        for layer, n in enumerate(row):
            batch = batch_of(step, layer, run.prompt + step + 1, run.top_k)
            needed = [layout.slice_id(layer, expert) for expert in batch.experts]
            machine.execute(LayerPlan(batch, needed, needed[:n]))
    return machine.tokens


def read_machine(header: Header, profile: Profile, overlap: bool, reads: int) -> ReadMachine:
    """Return a machine at time 0 for the model of *header*."""
    hierarchy = hierarchy_of(profile, overlap)
    return ReadMachine(hierarchy, costs_of(header, hierarchy), layout_of(header), reads=reads)


def misses_of(run: Run, header: Header, reads: int = READS, seed: int = 0) -> Ints:
    """Return how many experts each layer misses, (tokens, layers), drawn from a run's bytes."""
    layout = layout_of(header)
    misses = experts_read(layout, run.columns["read_bytes"].tolist(), reads)
    return spread(misses, layout.n_layers, run.top_k, seed)
