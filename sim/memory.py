"""This module checks that a run fits: what the fastest tier holds beside the expert cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from moetier.sim.layout import Layout
from moetier.sim.machine.hierarchy import Hierarchy
from moetier.sim.machine.work import DenseWork, kv_bytes_at
from moetier.sim.policy.compose import Policy
from moetier.sim.units import format_bytes
from moetier.traces.columns import ColumnSource
from moetier.traces.errors import InputError
from moetier.traces.formats import stored_expert_bytes
from moetier.traces.schema import Header


@dataclass(frozen=True, slots=True)
class Extent:
    """How far a source goes: most key/value entries and requests alive at once, and steps."""

    context: int
    steps: int
    prefill_tokens: int
    decode_tokens: int
    requests: int = 1


def extent_of(source: ColumnSource) -> Extent:
    """Scan *source* once for its extent, reading narrow columns only."""
    context = steps = prefill = decode = 0
    requests = 1
    last = -1
    held: dict[int, int] = {}  # step -> entries, of the step a chunk may end in
    for rows in source.columns():
        first = rows.moe_layer == 0
        step, position = rows.step[first], rows.position[first].astype(np.int64) + 1
        phase, valid = rows.phase[first], rows.valid[first]
        prefill += int(np.count_nonzero(valid & (phase == 0)))
        decode += int(np.count_nonzero(valid & (phase == 1)))
        if not len(step):
            continue
        starts = np.flatnonzero(np.concatenate(([True], step[1:] != step[:-1])))
        # prefill keeps one entry per token, decode the whole context of every request
        entries = np.add.reduceat(np.where(phase == 1, position, 1), starts)
        together = np.add.reduceat((phase == 1).astype(np.int64), starts)
        prompts = np.unique(rows.request[first][phase == 0])
        requests = max(requests, int(together.max()), len(prompts))
        steps += len(starts) - int(step[0] == last)
        last = int(step[-1])
        totals = dict(zip(step[starts].tolist(), entries.tolist(), strict=True))
        for at, count in totals.items():
            totals[at] = count + held.pop(at, 0)
        context = max(context, *totals.values())
        held = {last: totals[last]}
    return Extent(context, steps, prefill, decode, requests)


@dataclass(frozen=True, slots=True)
class Budget:
    """The bytes of the fastest tier, by what they are for; `left` is what a cache may take."""

    tiers: tuple[str, ...]
    sizes: tuple[int, ...]
    dense: int
    kv: int
    predictors: int
    sketches: int  # what the policy's precision keeps beside the experts
    stored: int  # all routed experts, at the stored format

    @property
    def beside(self) -> int:
        """Return what must be resident beside the expert cache."""
        return self.dense + self.kv + self.predictors + self.sketches

    @property
    def left(self) -> int:
        """Return what the fastest tier has left for experts; may be negative."""
        return self.sizes[0] - self.beside

    def overflow(self, peak: int) -> list[str]:
        """Return a warning where *peak* bytes of experts do not fit beside the rest."""
        over = self.beside + peak - self.sizes[0]
        if over <= 0:
            return []
        return [
            f"'{self.tiers[0]}' overflows: a batch's experts beside the cached ones take "
            f"{format_bytes(peak)}, {format_bytes(over)} more than fit beside {self.spelled()}; "
            "set a smaller capacity"
        ]

    def spelled(self) -> str:
        """Return the parts as text."""
        parts = {"dense weights": self.dense, "KV cache": self.kv}
        if self.predictors:
            parts["predictors"] = self.predictors
        if self.sketches:
            parts["sketches and low-rank maps"] = self.sketches
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())


def budget(
    hierarchy: Hierarchy,
    work: DenseWork,
    header: Header,
    weights: str,
    extent: Extent,
    predictor_bytes: int = 0,
    sketch_bytes: int = 0,
) -> Budget:
    """Return the budget of a run; raise `InputError` when its experts fit nowhere."""
    geometry = header.geometry
    sizes = tuple(tier.capacity for tier in hierarchy.tiers)
    stored = geometry.n_experts * sum(stored_expert_bytes(header, weights)[1])
    if stored > sizes[-1]:
        raise InputError(
            f"the experts take {format_bytes(stored)}, but tier '{hierarchy.names[-1]}', which "
            f"must hold all of them, has {format_bytes(sizes[-1])}",
            where="hardware",
            way_out="use fewer bits (`weights:`) or a machine with another tier",
        )
    # The embedding is read a row at a time and may stay below; the head was counted as dense.
    return Budget(
        hierarchy.names,
        sizes,
        int(work.weight_bytes.sum()),
        kv_bytes_at(work, extent.context, extent.requests),
        predictor_bytes,
        sketch_bytes,
        stored,
    )


def capacities(
    budget: Budget,
    wanted: Mapping[str, int | Fraction],
    policy: Policy,
    layout: Layout,
    top_k: int,
) -> list[int]:
    """Return the bytes of each cached tier's expert budget, fastest first.

    Raises:
        InputError: If a tier is unknown, or a budget is too small for one token or too large.
    """
    cached = budget.tiers[:-1]
    for tier in wanted:
        if tier not in cached:
            raise InputError(
                f"'{tier}' is not a cached tier",
                where="capacity",
                way_out=f"use {', '.join(cached)}",
            )
    if budget.left < 0:
        raise InputError(
            f"tier '{cached[0]}' has {format_bytes(budget.sizes[0])}, less than what must be there "
            f"beside the experts ({budget.spelled()})",
            where="hardware",
            way_out="use fewer bits, a shorter context or fewer requests",
        )
    found = []
    for at, tier in enumerate(cached):
        room = budget.left if at == 0 else budget.sizes[at]
        size = _bytes(wanted.get(tier, room), budget.stored)
        if size > room:
            raise InputError(
                f"{format_bytes(size)} of experts do not fit in '{tier}': {format_bytes(room)} of "
                f"{format_bytes(budget.sizes[at])} are left"
                + (f" beside {budget.spelled()}" if at == 0 else ""),
                where=f"capacity.{tier}",
                way_out="lower it, or leave it out to take all that is left",
            )
        least = top_k * max(
            sum(layout.nbytes[s : s + layout.n_parts])
            for s in range(0, len(layout.nbytes), layout.layer_slices)
        )
        if size < least and not policy.eviction[at].ignores_capacity:
            raise InputError(
                f"{format_bytes(size)} cannot hold the {top_k} experts that one token needs in one "
                f"layer, {format_bytes(least)}",
                where=f"capacity.{tier}",
                way_out=f"give at least {format_bytes(least)}, or `eviction: double-buffer`",
            )
        found.append(min(size, layout.total_bytes))
    return found


def _bytes(value: int | Fraction, stored: int) -> int:
    """Return a budget in bytes; a share is of all routed-expert bytes at the stored format."""
    return value if isinstance(value, int) else int(value * stored)
