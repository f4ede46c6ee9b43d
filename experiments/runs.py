"""This module performs one run and returns everything it has to say as one mapping."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from fractions import Fraction
from pathlib import Path
from typing import Any

import moetier
from moetier.experiments.config import OWN, RunConfig, load_hardware
from moetier.experiments.files import inside
from moetier.experiments.resolve import resolved
from moetier.experiments.sources import open_source, open_trace_file
from moetier.experiments.timeline import TimelineWriter
from moetier.sim.hardware import Profile
from moetier.sim.records import Columns, OnColumns, RecordWriter
from moetier.sim.run import Result as SimResult
from moetier.sim.run import Setting, TraceSource, simulate


class Digest:
    """A fingerprint of a run's records: equal for two runs that did the same."""

    def __init__(self) -> None:
        """Begin with no rows."""
        self._hash = hashlib.sha256()

    def __call__(self, columns: Columns) -> None:
        """Take in a block of rows."""
        for name in columns:
            self._hash.update(columns[name].tobytes())

    def hex(self) -> str:
        """Return the fingerprint."""
        return self._hash.hexdigest()


def setting_of(config: RunConfig, profile: Profile) -> Setting:
    """Return what the simulator needs of *config*."""
    capacity: dict[str, int | Fraction] = dict(config.capacity)
    return Setting(
        profile=profile,
        policy=config.policy,
        capacity=capacity,
        weights=config.weights,
        tiers=config.tiers,
        exclusive=config.exclusive,
        overlap=config.overlap,
        seed=config.seed,
        warmup_steps=config.measure.warmup_steps,
        kv_bytes=config.kv_bytes,
    )


def run(
    config: RunConfig,
    *,
    where: str | None = None,
    records: Path | None = None,
    timeline: Path | None = None,
    on_step: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Simulate *config* and return metrics, warnings, limitations, config and provenance.

    *records* and *timeline* are files to write; they appear only when the run is complete. *where*
    names the config in errors.
    """
    with inside(where) if where else nullcontext(), ExitStack() as stack:
        opened = open_source(config)
        profile = load_hardware(config.hardware)
        digest = Digest()
        sinks: list[OnColumns] = [digest]
        on_span = None
        if records is not None:
            sinks.append(stack.enter_context(RecordWriter(records)))
        if timeline is not None:
            label = f"{profile.name} (simulated)"
            on_span = stack.enter_context(TimelineWriter(timeline, label))
        popularity = popularity_of(config, opened.source)
        result = simulate(
            opened.source,
            setting_of(config, profile),
            sinks=sinks,
            on_span=on_span,
            popularity=popularity,
            on_step=on_step,
        )
    return outcome(config, result, opened.fingerprint, digest.hex())


def popularity_of(config: RunConfig, own: TraceSource) -> TraceSource | None:
    """Return the trace whose counts a static part uses; `own` is the run's own routing."""
    if config.popularity == OWN:
        return own
    return None if config.popularity is None else open_trace_file(config.popularity).source


def outcome(config: RunConfig, result: SimResult, fingerprint: str, digest: str) -> dict[str, Any]:
    """Return all that *result* says, of a source and records with these fingerprints."""
    stage = result.stage
    full = resolved(config)
    full["weights"] = stage.weights
    full["tiers"] = list(stage.hierarchy.names)
    own = "popularity is that of the run itself, which nobody knows in advance"
    return {
        **result.metrics,
        "elapsed_ms": result.elapsed_ns / 1e6,
        "capacity_bytes": dict(zip(stage.hierarchy.cached, stage.capacities, strict=True)),
        "expert_bytes_total": stage.budget.stored,
        "uniform_slices": len(set(stage.layout.nbytes)) == 1,
        "warnings": result.warnings,
        "known_limitations": result.known_limitations + [own] * (config.popularity == OWN),
        "config": full,
        "provenance": {
            "moetier": moetier.__version__,
            "source": fingerprint,
            "records": digest,
        },
    }
