"""This module makes small traces with everything a trace may have, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from moetier.traces.batch import DECODE, PREFILL
from moetier.traces.columns import PAD, Columns, build
from moetier.traces.geometry import Geometry
from moetier.traces.schema import Header, Predictor, Provenance


def small_header(
    *, full: bool = True, n_experts: int = 8, top_k: int = 3, layers: int = 3
) -> Header:
    """Return a header; *full*: with scores, two predictors and recorded residency."""
    return Header(
        geometry=Geometry(
            name="small", n_experts=n_experts, top_k=top_k, moe_layers=list(range(1, layers + 1))
        ),
        score_kind="logits" if full else "none",
        predictors=[Predictor(name="p", horizon=h) for h in (1, 2)] if full else [],
        recorded_residency=full,
        provenance=Provenance(kind="synthetic"),
    )


def small_rows(
    header: Header,
    *,
    requests: int = 2,
    prompt: int = 3,
    tokens: int = 4,
    padding: float = 0.0,
    invalid: float = 0.0,
    unknown: float = 0.0,
    seed: int = 0,
) -> Columns:
    """Return random rows in forward order: a prefill step, then lockstep decode steps.

    *padding* is the share of empty slots, *invalid* that of invalid rows, and *unknown* that of
    rows without weights, scores or predictions (each on its own).
    """
    random = np.random.Generator(np.random.PCG64(seed))
    geometry = header.geometry
    k, n_experts, n_layers = geometry.top_k, geometry.n_experts, geometry.n_moe_layers
    where = [
        (request, PREFILL, 0, position, layer)
        for layer in range(n_layers)
        for request in range(requests)
        for position in range(prompt)
    ]
    where += [
        (request, DECODE, step + (prompt > 0), prompt + step, layer)
        for step in range(tokens)
        for layer in range(n_layers)
        for request in range(requests)
    ]
    request, phase, step, position, layer = np.array(where).T
    n = len(where)
    experts = random.random((n, n_experts)).argsort(axis=1)[:, :k]
    experts[random.random((n, k)) < padding] = PAD

    def floats(width: int) -> Any:
        values = random.random((n, width), np.float32)
        values[random.random(n) < unknown] = np.nan
        return values

    full = header.recorded_residency
    return build(
        header,
        request=request,
        phase=phase,
        step=step,
        position=position,
        moe_layer=layer,
        experts=experts,
        weights=floats(k),
        valid=random.random(n) >= invalid,
        scores=floats(n_experts) if header.score_kind != "none" else None,
        predicted={item.horizon: floats(n_experts) for item in header.predictors},
        recorded=random.integers(0, 3, (n, k)) if full else None,
    )
