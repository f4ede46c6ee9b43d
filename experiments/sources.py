"""This module opens a run's routing source, and keeps small ones in memory for the next run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

from moetier.experiments.config import RunConfig, SyntheticConfig
from moetier.experiments.files import find_file, inside
from moetier.sim.policy.compose import expand
from moetier.sim.policy.seams import DEFAULTS, SEAMS
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry, load_geometry
from moetier.traces.io import ArrayTrace, TraceReader
from moetier.traces.predictors import create
from moetier.traces.predictors.annotate import Annotated
from moetier.traces.schema import Header
from moetier.traces.synthetic import Synthetic

if TYPE_CHECKING:
    from moetier.sim.run import TraceSource

HELD_BYTES = 128 << 20
"""A source whose rows take less is read or drawn once per process."""


@dataclass(frozen=True)
class Opened:
    """A routing source and what identifies its content."""

    source: TraceSource
    fingerprint: str


def open_source(config: RunConfig) -> Opened:
    """Return the source of *config*; raise `InputError` when it cannot be used."""
    if config.live is not None:
        raise InputError(
            "a live model is not simulated but run",
            where="live",
            way_out="use `moetier evaluate`, or capture a trace",
        )
    opened = _recorded(config)
    if config.predictor is None:
        return opened
    spec = json.dumps(config.predictor, sort_keys=True)
    predictor = create(config.predictor, "predictor")
    with inside("predictor"):
        source = cast("TraceSource", Annotated(opened.source, predictor))
    content = f"{opened.fingerprint} {spec}"
    return Opened(source, hashlib.sha256(content.encode()).hexdigest())


def _recorded(config: RunConfig) -> Opened:
    """Return the trace or the synthetic routing of *config*."""
    if config.synthetic is not None:
        return _synthetic(config.synthetic.model_dump_json(), _needs_scores(config))
    assert config.trace is not None
    with inside("trace"):
        opened = open_trace_file(config.trace, with_scores=_reads_scores(config))
    if config.model is None:
        return opened
    with inside("model"):
        return _with_model(opened, config.model)


def open_trace_file(text: str, *, with_scores: bool = False) -> Opened:
    """Return the trace file *text*, from memory where this process has read it before."""
    path = find_file(text).resolve()
    stat = path.stat()
    return _trace(path, with_scores, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=4)
def _trace(path: Path, with_scores: bool, mtime_ns: int, size: int) -> Opened:
    reader = TraceReader(path, with_scores=with_scores)
    held = reader.n_rows * _row_bytes(reader.header, with_scores) < HELD_BYTES
    return Opened(ArrayTrace.of(reader) if held else reader, reader.fingerprint)


@lru_cache(maxsize=4)
def _synthetic(text: str, scores: bool) -> Opened:
    spec = SyntheticConfig.model_validate_json(text)
    arguments = spec.model_dump()
    whole = load_geometry(arguments.pop("geometry"))
    geometry = whole.first_layers(arguments.pop("layers") or whole.n_moe_layers)
    source = Synthetic(geometry, **arguments, scores=scores)
    rows = (spec.prompt + spec.tokens) * spec.requests * geometry.n_moe_layers
    held = rows * _row_bytes(source.header, scores) < HELD_BYTES
    content = json.dumps([arguments, geometry.model_dump(mode="json")], sort_keys=True)
    fingerprint = hashlib.sha256(content.encode()).hexdigest()
    return Opened(ArrayTrace.of(source) if held else source, fingerprint)


def _row_bytes(header: Header, with_scores: bool) -> int:
    geometry = header.geometry
    wide = 1 + len(header.predictors) if with_scores else 0
    return 20 + 6 * geometry.top_k + 4 * wide * geometry.n_experts


def _reads_scores(config: RunConfig) -> bool:
    """Return whether a part may look at router scores or predictions, which are wide to read."""
    if config.predictor is not None:
        return True
    seams = expand(config.policy)
    return any(
        seams[seam] != DEFAULTS[seam] for seam in ("routing", "precision", "prefetch", "miss")
    )


def _needs_scores(config: RunConfig) -> bool:
    """Return whether a part cannot do without router scores; they change no choice."""
    kinds = (
        (seam, value["kind"] if isinstance(value, Mapping) and "kind" in value else value)
        for seam, value in expand(config.policy).items()
    )
    return any(
        getattr(SEAMS[seam].get(kind), "needs_scores", False)
        for seam, kind in kinds
        if isinstance(kind, str)
    )


@lru_cache(maxsize=4)
def _with_model(opened: Opened, name: str) -> Opened:
    """Return the source with the published geometry *name* for what its header does not know."""
    source, published = opened.source, load_geometry(name)
    header = source.header
    geometry = complete(header, published)
    told = {"model", "layer", *Geometry.model_fields}
    told |= {f"geometry.{key}" for key in Geometry.model_fields}
    unknown = [item for item in header.unknown if item not in told]
    changed = header.model_copy(update={"geometry": geometry, "unknown": unknown})
    if isinstance(source, TraceReader):
        reader = TraceReader(source.path, with_scores=source.with_scores)
        reader.header = changed
        return Opened(reader, opened.fingerprint)
    return Opened(ArrayTrace(changed, list(source.columns())), opened.fingerprint)


def complete(header: Header, published: Geometry) -> Geometry:
    """Return *published*, after checking that it agrees with what a trace's *header* knows.

    Where the trace had to guess its number of experts, that is a lower bound.
    """
    found = header.geometry
    guessed = "n_experts" in header.unknown and found.n_experts <= published.n_experts
    for key in ("n_experts", "top_k", "n_moe_layers", "hidden", "moe_intermediate"):
        have, want = getattr(found, key), getattr(published, key)
        if have is None or have == want or (guessed and key == "n_experts"):
            continue
        raise InputError(
            f"the trace has {key} {have}, '{published.name}' {want}",
            way_out="name the model that was traced",
        )
    return published
