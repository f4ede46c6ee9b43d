"""This module measures the simulator's own speed, beside a peer that only counts hits.

The peer is `policy_topk_lru` of moe-policylang 1.15.0, one call per layer on prepared arrays; what
it takes to prepare them is not counted. Ours is a whole run: timing, energy, and the records
written to disk. Both run in turn, on one core, and medians are compared.
"""

from __future__ import annotations

import importlib
import importlib.util
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from moetier.experiments.bench_sweep import SMALL_POINTS, overhead, two_processes
from moetier.sim.hardware import load_profile
from moetier.sim.records import RecordWriter
from moetier.sim.run import Setting, TraceSource, simulate
from moetier.traces.batch import LayerBatch
from moetier.traces.geometry import Geometry, load_geometry
from moetier.traces.io import ArrayTrace, TraceReader
from moetier.traces.predictors import create
from moetier.traces.predictors.annotate import Annotated
from moetier.traces.synthetic import Synthetic

MODEL, MACHINE, TIER = "qwen3-30b-a3b", "rtx-a6000", "hbm"
TOKENS, REPEATS = 1000, 5
SKEW, REUSE = 1.0, 0.35  # about 70 % hits at a quarter of the experts
QUARTER, SCARCE = Fraction(1, 4), Fraction(1, 20)
LONG_TOKENS, LONG_MB = 100_000, 600
LIVE = {
    "evaluate-overhead": ("on-demand", "on-demand"),
    "evaluate-bit-sliced": ("slicemoe", "bit slices of 6/3, cache-aware routing and warm-up"),
}
"""Policies that run inside a model, and what they are."""

Row = dict[str, Any]


def bench(*, tokens: int = TOKENS, repeats: int = REPEATS, long: bool = False) -> list[Row]:
    """Return one row per measurement: `{name, rate, peer_rate, ratio, repeats, unit, ...}`.

    *long* adds the run of 100,000 tokens and large sweeps, which takes minutes.
    """
    source = made(load_geometry(MODEL), tokens)
    rows = [
        *_against_peer(source, repeats),
        _tokens_linear(source, tokens, repeats),
        _experts_independent(max(tokens // 4, 2), repeats),
        _startup(repeats),
    ]
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        rows += [_evaluate_overhead(name, repeats) for name in LIVE]
    return rows + ([_long_run(), _sweep_overhead(), _sweep_two(repeats)] if long else [])


def made(geometry: Geometry, tokens: int) -> ArrayTrace:
    """Return decode-only synthetic routing in memory."""
    return ArrayTrace.of(Synthetic(geometry, tokens=tokens, skew=SKEW, reuse=REUSE, seed=0))


def timed_run(
    source: TraceSource,
    policy: str | dict[str, str] = "on-demand",
    share: Fraction = QUARTER,
) -> tuple[float, dict[str, Any]]:
    """Return seconds and metrics of one whole run, its records written to a scratch file."""
    setting = Setting(load_profile(MACHINE), policy, {TIER: share})
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        with RecordWriter(Path(folder) / "records.parquet") as writer:
            metrics = simulate(source, setting, sinks=[writer]).metrics
        return time.perf_counter() - begin, metrics


def peer(source: ArrayTrace) -> Callable[[], tuple[float, int, int]] | None:
    """Return a function giving the peer's seconds, hits and lookups; None without the peer."""
    try:
        replay = importlib.import_module("moe_policylang.benchmark.replay")
    except ImportError:
        return None
    geometry = source.header.geometry
    k, layers = geometry.top_k, geometry.n_moe_layers
    ids = np.concatenate([rows.experts for rows in source.columns()]).reshape(-1, layers, k)
    scores = np.zeros((layers, len(ids), geometry.n_experts), np.float32)
    for slot in range(k):
        at = ids[:, :, slot].T[:, :, None].astype(np.int64)
        np.put_along_axis(scores, at, np.float32(1 - 0.01 * slot), axis=2)
    budget = int(geometry.n_experts * QUARTER)

    def run() -> tuple[float, int, int]:
        begin = time.perf_counter()
        counts = [replay.policy_topk_lru(layer, k, budget) for layer in scores]
        took = time.perf_counter() - begin
        return took, sum(hits for hits, _ in counts), sum(lookups for _, lookups in counts)

    return run


class Predicted:
    """A source with recorded predictions, all its batches in memory."""

    def __init__(self, source: ArrayTrace) -> None:
        """Draw predictions for *source* once."""
        predictor = create({"kind": "recall-model", "recall": [0.9]})
        annotated = Annotated(source, predictor)
        self.header, self.columns = annotated.header, source.columns
        self._batches = list(annotated.batches())

    def batches(self) -> Iterator[LayerBatch]:
        """Yield the batches in forward order. Can be called again."""
        return iter(self._batches)


def _against_peer(source: ArrayTrace, repeats: int) -> list[Row]:
    arms: dict[str, tuple[str | dict[str, str], Fraction, str]] = {
        "lru": ("on-demand", QUARTER, "a quarter of the experts"),
        "previous-token": (
            {"preset": "previous-token", "eviction": "fifo"}, QUARTER,
            "a quarter of the experts, first in first out: with lru they would hold all the last "
            "token used, and nothing would be prefetched",
        ),
        "previous-token-saturated": (
            "previous-token", SCARCE,
            "lru with 5 % of the experts, less than one token needs: everything is prefetched",
        ),
        "window-aware": (
            {"prefetch": "window-aware"}, QUARTER,
            "a quarter of the experts; predictions drawn at 90 % recall before the clock starts",
        ),
        "bit-sliced": (
            {"precision": "bit-sliced", "eviction": "slice-aware", "miss": "degrade"}, QUARTER,
            "8/4 bits, room for a quarter of the experts in bf16; a lookup is one unique slice",
        ),
    }  # fmt: skip
    sources: dict[str, TraceSource] = dict.fromkeys(arms, source)
    sources["window-aware"] = Predicted(source)
    theirs = peer(source)
    peer_rates, peer_hits = [], None
    rates: dict[str, list[float]] = {name: [] for name in arms}
    metrics: dict[str, dict[str, Any]] = {}
    for _ in range(repeats):
        if theirs is not None:
            took, hits, lookups = theirs()
            peer_rates.append(lookups / took)
            peer_hits = hits / lookups
        for name, (policy, share, _) in arms.items():
            took, metrics[name] = timed_run(sources[name], policy, share)
            rates[name].append(metrics[name]["lookups"] / took)
    return [
        row(
            name,
            rates[name],
            peer_rates,
            unit="lookups/s",
            hit_rate=metrics[name]["hit_rate_decode"],
            prefetch_issued=metrics[name]["prefetch_issued"],
            late_hit_rate=metrics[name]["late_hit_rate"],
            peer_hit_rate=peer_hits,
            note=note,
        )
        for name, (_, _, note) in arms.items()
    ]


def row(name: str, rates: list[float], peer_rates: list[float] | None = None, **more: Any) -> Row:
    """Return the medians of *rates* and *peer_rates*, their ratio, and the spread of repeats."""
    rate, their = median(rates), median(peer_rates) if peer_rates else None
    return {
        "name": name,
        "rate": rate,
        "peer_rate": their,
        "ratio": rate / their if their else None,
        "repeats": rates,
        "peer_repeats": peer_rates or [],
        "spread": (max(rates) - min(rates)) / rate,
        **more,
    }


def _tokens_linear(source: ArrayTrace, tokens: int, repeats: int) -> Row:
    """Return the cost per token at three lengths; the ratio is longest to shortest."""
    sizes = [max(tokens // 2, 1), tokens, 2 * tokens]
    geometry = source.header.geometry
    sources = [source if size == tokens else made(geometry, size) for size in sizes]
    found = _interleaved(sources, repeats, lambda took, _, i: took / sizes[i])
    costs = [median(values) for values in found]
    return {
        **row("tokens-linear", [1 / value for value in found[-1]], unit="tokens/s"),
        "ratio": costs[-1] / costs[0],
        "note": "ratio: cost per token, longest to shortest; 1 is linear",
        "us_per_token": dict(zip(map(str, sizes), (c * 1e6 for c in costs), strict=True)),
    }


def _experts_independent(tokens: int, repeats: int) -> Row:
    """Return the cost per lookup with 32, 128 and 512 experts of equal size."""
    sizes = [32, 128, 512]
    base = load_geometry(MODEL)
    sources = [made(base.model_copy(update={"n_experts": n}), tokens) for n in sizes]
    small = [_shrunk(source) for source in sources]
    found = _interleaved(small, repeats, lambda took, metrics, _: took / metrics["lookups"])
    costs = [median(values) for values in found]
    return {
        **row("experts-independent", [1 / value for value in found[-1]], unit="lookups/s"),
        "ratio": costs[-1] / costs[0],
        "note": "ratio: cost per lookup, 512 experts to 32; 1 is independent",
        "ns_per_lookup": dict(zip(map(str, sizes), (c * 1e9 for c in costs), strict=True)),
    }


def _shrunk(source: ArrayTrace) -> ArrayTrace:
    """Return *source* with narrow experts, so that 512 of them fit in the machine."""
    geometry = source.header.geometry.model_copy(update={"moe_intermediate": 128})
    header = source.header.model_copy(update={"geometry": geometry})
    return ArrayTrace(header, list(source.columns()))


def _interleaved(
    sources: list[ArrayTrace],
    repeats: int,
    cost: Callable[[float, dict[str, Any], int], float],
) -> list[list[float]]:
    found: list[list[float]] = [[] for _ in sources]
    for _ in range(repeats):
        for i, source in enumerate(sources):
            took, metrics = timed_run(source)
            found[i].append(cost(took, metrics, i))
    return found


def _startup(repeats: int) -> Row:
    """Return how often `moetier --help` can start in a second."""
    code = "from moetier.experiments.cli import main; main()"
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", code, "--help"], check=True, capture_output=True)
        seconds.append(time.perf_counter() - begin)
    return row("startup", [1 / s for s in seconds], unit="starts/s", seconds=median(seconds))


def _evaluate_overhead(name: str, repeats: int) -> Row:
    """Return how often the policy *name* can be evaluated in a second, beside the model alone."""
    from moetier.validate.evaluate_bench import overhead

    policy, about = LIVE[name]
    found = overhead(repeats, policy=policy)
    rates = [1 / seconds for seconds in found.evaluated]
    result = row(name, rates, [1 / s for s in found.plain], unit="runs/s")
    return result | {
        "overhead": 1 / result["ratio"],
        "note": f"{about} inside moe-tiny, beside moe-tiny alone; a ratio of 0.5 is twice its time",
    }


def _long_run(tokens: int = LONG_TOKENS) -> Row:
    """Return speed and peak memory of a run from file to file, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.parquet"
        Synthetic(load_geometry(MODEL), tokens=tokens, skew=SKEW, reuse=REUSE).write(trace)
        code = f"from moetier.experiments.bench import long_run; long_run({str(trace)!r})"
        done = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        )
    lookups, took, megabytes = (float(word) for word in done.stdout.split())
    return row(
        "long-run", [lookups / took], unit="lookups/s", peak_mb=megabytes, seconds=took,
        note=f"{tokens} tokens from a file, records to a file; memory limit {LONG_MB} MB",
        within_limit=megabytes < LONG_MB,
    )  # fmt: skip


def _sweep_overhead(points: int = SMALL_POINTS) -> Row:
    """Return what a small point of a large sweep costs."""
    found = overhead(points)
    return row(
        "sweep-overhead", [points / found["seconds"]], unit="points/s",
        note=f"{points} points of four tokens in two processes, all included, the runs too",
        **found,
    )  # fmt: skip


def _sweep_two(repeats: int) -> Row:
    """Return how often a sweep can be run in a second by two processes, beside one."""
    two, one = two_processes(repeats)
    return row(
        "sweep-two-processes", [1 / s for s in two], [1 / s for s in one], unit="sweeps/s",
        note="the same points in two processes and in one",
    )  # fmt: skip


def long_run(trace: str) -> None:
    """Run the *trace* and print lookups, seconds, and this process's peak memory in MB."""
    took, metrics = timed_run(TraceReader(trace))
    sys.stdout.write(f"{metrics['lookups']} {took} {_peak_mb()}\n")


def _peak_mb() -> float:
    """Return this process's peak memory in MB.

    `ru_maxrss` would count what the parent had before it started this program.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # bytes, on macOS
