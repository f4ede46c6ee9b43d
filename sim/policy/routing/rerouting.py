"""This module gives tokens other experts than its router did, weighed by its scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from moetier.sim.policy.base import Context
from moetier.traces.batch import Bools, Floats, LayerBatch
from moetier.traces.errors import InputError
from moetier.traces.gating import GateRule, Ints


def cached_experts(context: Context, layer: int) -> Bools:
    """Return which experts (E,) of *layer* have their first slice in the fastest tier, as planned.

    The first is the whole expert, its MSB slice, or its copy of high precision. Where experts are
    cached in blocks, none of which comes first, it takes half of them.
    """
    layout, resident = context.layout, context.resident
    base = layer * layout.layer_slices
    if layout.blocks:
        there = [s in resident for s in range(base, base + layout.layer_slices)]
        blocks = np.array(there).reshape(-1, layout.n_parts).sum(1)
        half: Bools = 2 * blocks >= layout.n_parts
        return half
    slices = range(base, base + layout.layer_slices, layout.n_parts)
    return np.array([s in resident for s in slices])


def scores_of(batch: LayerBatch) -> Floats:
    """Return the router's scores (V, E) for *batch*; raise `InputError` where it has none."""
    if batch.scores is None:
        raise InputError(
            f"MoE layer {batch.layer} of step {batch.step} has no router scores, by which experts "
            "are chosen anew",
            where="policy.routing",
            way_out="use a trace that has them on every row",
        )
    return batch.scores


def router_choice(batch: LayerBatch, n_experts: int) -> Bools:
    """Return which experts (V, E) the router chose for each token."""
    chosen = np.zeros((batch.n_tokens, n_experts), bool)
    chosen[batch.token_ids(), batch.experts] = True
    return chosen


def ranking(chosen: Bools, *keys: npt.NDArray[Any]) -> Ints:
    """Return each token's experts (V, E), smallest *keys* first, the first key being the foremost.

    What is still equal goes to the router's own choice, then to the lower id.
    """
    order: Ints = np.lexsort((~chosen, *reversed(keys)), axis=-1)
    return order


def rerouted(batch: LayerBatch, gate: GateRule, scores: Floats, order: Ints) -> LayerBatch:
    """Return *batch* with every token computed by the first experts of its *order* (V, E).

    A token gets as many as it had. One that gets the same ones keeps its entries as they are, and
    where all do the batch itself comes back. The others are weighed by *scores* (V, E), on the
    scale of the model's own weights, which may carry a factor that the gate rule does not know.
    """
    tokens = np.array(batch.token_ids())
    before = np.array(batch.experts)
    experts, weights = before.copy(), batch.weights
    changed = False
    for token in range(batch.n_tokens):
        own = np.flatnonzero(tokens == token)
        after = order[token, : len(own)]
        if set(after.tolist()) == set(before[own].tolist()):
            continue
        if not changed and weights is not None:
            weights = weights.copy()
        changed = True
        experts[own] = after
        if weights is not None:
            row = scores[token : token + 1]
            old = gate.weigh(row, before[None, own]).sum()
            made = gate.weigh(row, after[None])[0]
            weights[own] = made * (weights[own].sum() / old) if old > 0 else made
    if not changed:
        return batch
    return replace(batch, experts=experts.tolist(), weights=weights, recorded=None)
