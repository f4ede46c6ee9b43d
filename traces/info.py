"""This module describes a source in numbers: size, reuse, skew, working set, oddities."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from moetier.traces.batch import DECODE, LayerBatch, Source
from moetier.traces.errors import InputError
from moetier.traces.formats import stored_expert_bytes
from moetier.traces.schema import Header
from moetier.traces.skew import dispersion, entropy, hot_share, zipf_exponent

UNIFORM_DISPERSION = 1.25
PADDED_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Demand:
    """What one forward step asks for, over all its layers; a slice here is a whole expert."""

    slices_mean: float
    slices_max: int
    bytes_mean: float | None
    bytes_max: int | None
    layer_slices_max: int
    layer_bytes_max: int | None


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """A source in numbers. Shares are fractions; None is not known or does not apply."""

    model: str
    kind: str  # captured, imported or synthetic
    n_experts: int
    top_k: int
    n_moe_layers: int
    requests: int
    steps: int
    prefill_steps: int
    decode_steps: int
    prefill_tokens: int
    decode_tokens: int
    entries: int  # (token, layer, expert) triples
    lookups: int  # unique experts of each batch
    reuse: float | None
    # share of a decoded token's experts that the same request's previous token used in that layer
    reuse_by_chance: float  # what independent uniform draws would give: top_k / n_experts
    hot_share: float  # share of entries on the most asked tenth of each layer's experts
    zipf_exponent: float | None  # least squares over log rank, log count; mean over layers
    entropy: float | None  # of the counts, over that of a uniform choice; mean over layers
    dispersion: float | None  # variance of the counts over that of uniform draws; 1: uniform
    decode_step: Demand | None  # the working set: a cache below it gives demand-only LRU no hits
    prefill_step: Demand | None
    weights: str | None  # the format that bytes are counted in
    all_bytes: int | None  # of all routed experts: what a capacity of 100 % is
    compulsory_misses: int  # distinct experts asked for
    compulsory_bytes: int | None
    unknown: list[str]
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        return asdict(self)


def describe(source: Source, weights: str | None = None) -> TraceInfo:
    """Return *source* in numbers, in one pass; bytes are of the format *weights*.

    *weights* None takes what the source records, else bf16; unknown sizes leave bytes None.

    Raises:
        InputError: If *weights* is given and cannot be counted, or the source is wrong.
    """
    header = source.header
    name, nbytes = _sizes(header, weights)
    tally = _Tally(header, nbytes)
    for batch in source.batches():
        tally.add(batch)
    geometry = header.geometry
    n, k = geometry.n_experts, geometry.top_k
    counts = tally.counts
    touched = counts > 0
    spread = dispersion(counts, tally.rows, k)
    return TraceInfo(
        model=header.provenance.model or geometry.name,
        kind=header.provenance.kind,
        n_experts=n,
        top_k=k,
        n_moe_layers=geometry.n_moe_layers,
        requests=len(tally.requests),
        steps=tally.steps[0] + tally.steps[1],
        prefill_steps=tally.steps[0],
        decode_steps=tally.steps[1],
        prefill_tokens=tally.tokens[0],
        decode_tokens=tally.tokens[1],
        entries=int(counts.sum()),
        lookups=tally.lookups,
        reuse=tally.kept / tally.compared if tally.compared else None,
        reuse_by_chance=k / n,
        hot_share=hot_share(counts),
        zipf_exponent=zipf_exponent(counts),
        entropy=entropy(counts),
        dispersion=spread,
        decode_step=tally.demand[1].result(),
        prefill_step=tally.demand[0].result(),
        weights=name,
        all_bytes=None if nbytes is None else n * sum(nbytes),
        compulsory_misses=int(touched.sum()),
        compulsory_bytes=None if nbytes is None else int(touched.sum(axis=1) @ np.array(nbytes)),
        unknown=header.unknown,
        warnings=_warnings(tally, k, n, spread),
    )


def _sizes(header: Header, weights: str | None) -> tuple[str | None, list[int] | None]:
    try:
        return stored_expert_bytes(header, weights)
    except InputError:
        if weights is not None:
            raise
        return None, None


class _Steps:
    """Demand per step of one phase, added up batch by batch."""

    def __init__(self, sized: bool) -> None:
        self.sized = sized
        self.n = self.slices = self.slices_max = self.layer_slices_max = 0
        self.bytes = self.bytes_max = self.layer_bytes_max = 0
        self.step_slices = self.step_bytes = 0

    def add(self, new_step: bool, slices: int, nbytes: int) -> None:
        if new_step:
            self.n += 1
            self.step_slices = self.step_bytes = 0
        self.slices += slices
        self.bytes += nbytes
        self.step_slices += slices
        self.step_bytes += nbytes
        self.slices_max = max(self.slices_max, self.step_slices)
        self.bytes_max = max(self.bytes_max, self.step_bytes)
        self.layer_slices_max = max(self.layer_slices_max, slices)
        self.layer_bytes_max = max(self.layer_bytes_max, nbytes)

    def result(self) -> Demand | None:
        if not self.n:
            return None
        return Demand(
            slices_mean=self.slices / self.n,
            slices_max=self.slices_max,
            bytes_mean=self.bytes / self.n if self.sized else None,
            bytes_max=self.bytes_max if self.sized else None,
            layer_slices_max=self.layer_slices_max,
            layer_bytes_max=self.layer_bytes_max if self.sized else None,
        )


class _Tally:
    """Counts over the batches of a source."""

    def __init__(self, header: Header, nbytes: list[int] | None) -> None:
        geometry = header.geometry
        self.nbytes = nbytes or [0] * geometry.n_moe_layers
        self._counts = [[0] * geometry.n_experts for _ in range(geometry.n_moe_layers)]
        self.rows = [0] * geometry.n_moe_layers
        self.requests: set[int] = set()
        self.steps, self.tokens = [0, 0], [0, 0]
        self.lookups = self.kept = self.compared = 0
        self.zeros = self.ranges = 0
        self.demand = [_Steps(nbytes is not None), _Steps(nbytes is not None)]
        self._step: int | None = None
        self._most = 0  # tokens of the open step: a layer may see fewer than another
        self._previous: dict[tuple[int, int], frozenset[int]] = {}
        self._range = list(range(geometry.top_k))

    @property
    def counts(self) -> Any:
        """How often each expert was asked for: (layers, experts)."""
        return np.array(self._counts, np.int64)

    def add(self, batch: LayerBatch) -> None:
        phase, layer = batch.phase, batch.layer
        new_step = batch.step != self._step
        if new_step:
            self._step, self._most = batch.step, 0
            self.steps[phase] += 1
        if batch.n_tokens > self._most:
            self.tokens[phase] += batch.n_tokens - self._most
            self._most = batch.n_tokens
        self.rows[layer] += batch.n_tokens
        count = self._counts[layer]
        for expert in batch.experts:
            count[expert] += 1
        unique = len(set(batch.experts))
        self.lookups += unique
        self.demand[phase].add(new_step, unique, unique * self.nbytes[layer])
        requests = batch.requests or [0] * batch.n_tokens
        self.requests.update(requests)
        for request, ids in zip(requests, _by_token(batch), strict=True):
            self._token(phase, (request, layer), ids)

    def _token(self, phase: int, where: tuple[int, int], ids: list[int]) -> None:
        chosen = frozenset(ids)
        if phase == DECODE and (before := self._previous.get(where)) is not None:
            self.kept += len(chosen & before)
            self.compared += len(chosen)
        self._previous[where] = chosen
        if ids == self._range:
            self.ranges += 1
        elif len(ids) > 1 and not any(ids):
            self.zeros += 1


def _by_token(batch: LayerBatch) -> list[list[int]]:
    n = batch.n_tokens
    if n == 1:
        return [batch.experts]
    if batch.tokens is None:
        each = len(batch.experts) // n
        return [batch.experts[i * each : (i + 1) * each] for i in range(n)]
    ids: list[list[int]] = [[] for _ in range(n)]
    for token, expert in zip(batch.tokens, batch.experts, strict=True):
        ids[token].append(expert)
    return ids


def _warnings(tally: _Tally, k: int, n: int, spread: float | None) -> list[str]:
    found = []
    rows = sum(tally.rows)
    if tally.zeros:
        found.append(
            f"looks padded: {tally.zeros} rows have only zeros as ids; padding is -1 or valid=false"
        )
    if 2 < k < n and tally.ranges > PADDED_SHARE * rows:
        found.append(
            f"looks padded: {tally.ranges} of {rows} rows are exactly 0 to {k - 1} in that order"
        )
    enough = min((t for t in tally.rows if t), default=0) * k >= 5 * n
    if enough and spread is not None and spread < UNIFORM_DISPERSION:
        chance = tally.compared * k / n
        near = abs(tally.kept - chance) < 5 * max(chance, 1) ** 0.5
        found.append(
            "looks uniform: experts are equally popular"
            + (" and reuse is what chance gives" if near else "")
            + "; routing read from a wrong tensor looks like this, and no cache gains from it"
        )
    return found
