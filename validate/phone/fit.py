"""This module fits a profile to a phone's runs without overlap.

The flash tables stay the shape; per number of lanes one factor is fitted to the time the runs read,
through the code of the links. More lanes may not make each of them faster, nor all of them slower.
The peak is fitted to compute, and the overhead to what compute grows by with each byte read:
without overlap these runs have their cache management inside `compute_ms`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median

import numpy as np

from moetier.sim.hardware import Compute, Link, Profile
from moetier.sim.machine.links import LinkTime, Transfer
from moetier.sim.throughput import Point, Throughput
from moetier.traces.errors import InputError
from moetier.traces.schema import Header
from moetier.validate.phone.model import (
    MIB,
    MS,
    Ints,
    compute_ms,
    layout_of,
    management_ns,
    read_link,
)
from moetier.validate.phone.predict import misses_of
from moetier.validate.phone.reads import READS, in_reads
from moetier.validate.phone.runs import Run, Values, middle

STEP = 0.01  # of the factors
_FIRST_STEP = 0.16
_PEAK_DIGITS, _NS_DIGITS = -8, -4  # decimals kept: of operations per second, and of ns
Factors = dict[int, float]  # by number of lanes


@dataclass(frozen=True)
class Reading:
    """One run: how many experts each layer misses, per warm token, and the time that took."""

    run: Run
    misses: Ints  # (tokens, layers)
    measured: Values  # ms per token


@dataclass(frozen=True)
class Fit:
    """What was fitted: the profile, the factors, and per run the median I/O, ms, of both."""

    profile: Profile
    factors: Factors
    io_ms: dict[str, tuple[float, float]]  # measured, fitted
    compute_ms: float
    ms_per_mib: float  # of cache management
    mgmt_ms: float  # of the profile, per token


def chosen(runs: Sequence[Run], top_k: int) -> list[Run]:
    """Return the runs that a fit may use: without overlap, *top_k* experts per token.

    Raises:
        InputError: If they do not tell the numbers of lanes apart, or none has a cache.
    """
    found = [run for run in runs if not run.overlap and run.top_k == top_k]
    if not any(run.cache_mib for run in found) or len({run.lanes for run in found}) < 2:
        raise InputError(
            f"{len(found)} runs without overlap and with {top_k} experts per token",
            where="runs",
            way_out="a fit needs two numbers of lanes, and a run with a cache",
        )
    return found


def fit(runs: Sequence[Run], header: Header, base: Profile, name: str) -> Fit:
    """Fit *base*, whose link has the flash tables, to *runs*; call the result *name*."""
    link = read_link(base)
    readings = [_reading(run, header) for run in runs]
    factors = _factors(link, readings, header)
    fitted = scaled(link, factors)
    processor, about = _processor(runs, header, base)
    names = ", ".join(run.name for run in runs)
    source = (
        f"fitted on {names}: per number of lanes, the measured table of '{base.name}' (O_DIRECT "
        "random reads, cold; its rows for one lane are estimates but for 4 MiB) times "
        + ", ".join(f"{factor:.2f} ({lanes})" for lanes, factor in factors.items())
        + "; three reads per expert, each a page longer. The factors also hold what a batch of "
        "reads costs beside its bytes, as waking threads and copying into fresh pages"
    )
    changed = fitted.model_copy(update={"source": source})
    profile = base.model_copy(
        update={
            "name": name,
            "links": [changed if x is link else x for x in base.links],
            "compute": {**base.compute, next(iter(base.compute)): processor},
        }
    )
    io = {
        r.run.name: (float(np.median(r.measured)), float(np.median(_io(fitted, r, header))))
        for r in readings
    }
    return Fit(profile, factors, io, *about)


def _processor(
    runs: Sequence[Run], header: Header, base: Profile
) -> tuple[Compute, tuple[float, float, float]]:
    """Return the fitted processor, and the last three fields of `Fit`."""
    lines = [management(run) for run in runs]
    compute = median(level for level, _ in lines)
    cached = [(run, slope) for run, (_, slope) in zip(runs, lines, strict=True) if run.cache_mib]
    slope = median(each for _, each in cached)
    largest = max(run.cache_mib for run, _ in cached)
    read = median(run.level("read_bytes") for run, _ in cached if run.cache_mib == largest) / MIB
    overhead = round(management_ns(header, slope * read), _NS_DIGITS)
    top_k, context = runs[0].top_k, middle(runs[0])
    faster = compute_ms(header, base, top_k, context) / compute
    main = base.main_compute
    names, with_cache = (
        ", ".join(run.name for run in some) for some in (runs, [run for run, _ in cached])
    )
    source = (
        f"peak fitted on {names}: {compute:.1f} ms of compute per token with {top_k} experts, the "
        "median over these runs of what is left at 0 bytes read; the phone's clock changes from "
        f"run to run. Overhead, paid twice per layer, fitted on {with_cache}: {slope:.3f} ms of "
        f"cache management per MiB read, at the {read:.0f} MiB per token of {largest} MiB of cache"
    )
    fitted = main.model_copy(
        update={
            "peak": {
                kind: int(round(rate * faster, _PEAK_DIGITS)) for kind, rate in main.peak.items()
            },
            "overhead": overhead,
            "source": source,
        }
    )
    return fitted, (compute, slope, 2 * overhead * header.geometry.n_moe_layers / MS)


def management(run: Run) -> tuple[float, float]:
    """Return the compute of *run* at 0 bytes read, ms, and what each MiB read adds, ms.

    Least squares over warm tokens; without a cache there is nothing to manage, and all tokens read
    as much.
    """
    compute = run.warm("compute_ms")
    if not run.cache_mib:
        return float(np.median(compute)), 0.0
    slope, level = np.polyfit(run.warm("read_bytes") / MIB, compute, 1)
    return float(level), float(slope)


def scaled(link: Link, factors: Factors) -> Link:
    """Return *link* with the rates of each number of lanes times its factor, in whole MiB/s."""
    rows = [
        Point.model_construct(
            size=p.size, lanes=p.lanes, rate=round(p.rate * factors.get(p.lanes, 1.0) / MIB) * MIB
        )
        for p in link.bandwidth.points
    ]
    return link.model_copy(update={"bandwidth": Throughput(tuple(rows))})


def _reading(run: Run, header: Header) -> Reading:
    counts = misses_of(run, header)
    return Reading(run, counts[len(counts) // 3 :], run.warm("io_ms"))


def _io(link: Link, reading: Reading, header: Header) -> Values:
    """Return the ms per token that *link* takes: one batch per layer, the link idle before."""
    run, layout = reading.run, in_reads(layout_of(header), READS)
    served = link.model_copy(update={"lanes": run.lanes})
    sizes = layout.nbytes[:: layout.layer_slices]
    table = {
        size: np.array([_batch_ms(served, size, n * READS) for n in range(run.top_k + 1)])
        for size in set(sizes)
    }
    layers = [table[size][reading.misses[:, i]] for i, size in enumerate(sizes)]
    return np.asarray(np.sum(layers, axis=0), np.float64)


def _batch_ms(link: Link, nbytes: int, count: int) -> float:
    time = LinkTime(link)
    time.demand(0, [Transfer(i, nbytes, 0, 0, True) for i in range(count)])
    return max(time.free) / MS


def _factors(link: Link, readings: Sequence[Reading], header: Header) -> Factors:
    """Search the factors from 1 on, one at a time, for the least mean error over runs."""

    def cost(factors: Factors) -> float:
        trial = scaled(link, factors)
        if not plausible(trial):
            return float("inf")
        return mean(
            float(np.mean(np.abs(_io(trial, r, header) / r.measured - 1))) for r in readings
        )

    start = dict.fromkeys(sorted({p.lanes for p in link.bandwidth.points}), 1.0)
    return descend(cost, start)


def descend(cost: Callable[[Factors], float], start: Factors) -> Factors:
    """Return where no step of `STEP` in one or in all factors lowers *cost*."""
    best, least, step = start, cost(start), _FIRST_STEP
    moves = [*((lanes,) for lanes in start), tuple(start)]
    while step >= STEP / 2:
        better = False
        for move in moves:
            for by in (step, -step):
                trial = {n: round(f + by * (n in move), 4) for n, f in best.items()}
                found = cost(trial) if min(trial.values()) > 0 else float("inf")
                if found < least:
                    best, least, better = trial, found, True
        if not better:
            step /= 2
    return best


def plausible(link: Link) -> bool:
    """Return whether each lane gets less, and all together more, the more lanes there are."""
    lanes = sorted({p.lanes for p in link.bandwidth.points})
    for size in {p.size for p in link.bandwidth.points}:
        total = [link.bandwidth.total(size, n) for n in lanes]
        each = [rate / n for rate, n in zip(total, lanes, strict=True)]
        if total != sorted(total) or each != sorted(each, reverse=True):
            return False
    return True
