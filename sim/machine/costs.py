"""This module says how long compute takes: a roofline over what the work counts.

    time = max(operations / peak, bytes / bandwidth) + overhead

rounded up to whole nanoseconds, for the dense part and for the experts of a batch each; measured
times take its place where the profile has them (`machine.tables`). The host time per layer of the
profile, what the host program spends between kernels, is part of the dense part, once for every
layer of the model that a MoE layer stands for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from math import ceil
from typing import NamedTuple

import numpy as np

from moetier.sim.hardware import Compute
from moetier.sim.layout import Layout
from moetier.sim.machine.hierarchy import Hierarchy
from moetier.sim.machine.tables import (
    Surface,
    computed_experts,
    dense_surface,
    expert_surface,
)
from moetier.sim.machine.work import DenseWork
from moetier.sim.plan import LayerPlan
from moetier.sim.units import ceil_div
from moetier.traces.batch import DECODE, PREFILL, LayerBatch

_MEMO_LIMIT = 65536  # entries; the context grows with every token, so the memo must not
_LOOK_AHEAD = 256  # decode steps


class ExpertPart(NamedTuple):
    """One expert of a batch: its slices that compute reads, and its share of the time, in ns."""

    expert: int
    slices: list[int]
    ns: int


class Costs:
    """The compute times of one model on one machine, in ns."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        dense: DenseWork,
        layout: Layout,
        expert_ops: int,
        dtype: str = "bf16",
        kernel: str = "whole",
    ) -> None:
        """Take *expert_ops*, the operations of one expert on one token; 0 where unknown.

        *kernel* computes the experts, for which a profile may have measured times.
        """
        self.dense, self.layout, self.expert_ops = dense, layout, expert_ops
        main, cpu = hierarchy.main, hierarchy.cpu
        self._main = Roofline(main, hierarchy.tiers[0].bandwidth, dtype)
        self._cpu = Roofline(cpu, hierarchy.tiers[1].bandwidth, dtype) if cpu else None
        self._host = (main.host_time_per_layer * dense.model_layers).tolist()  # per MoE layer
        self._kinds = _kinds(dense)
        self._dense_memo: dict[tuple[int, int, int, int], int] = {}
        self._context = self._tokens = self._phase = -1
        self._of_kind: list[int] = []
        self._expert_memo: dict[tuple[int, int], int] = {}
        self._remarks: dict[str, None] = {}  # in the order in which they came up
        remark = self._remarks.setdefault
        self._table = expert_surface(main, kernel, remark)
        self._cpu_table = expert_surface(cpu, kernel, remark) if cpu else None
        self._dense_table = [dense_surface(main, phase, remark) for phase in (PREFILL, DECODE)]
        self._table_memo: dict[tuple[int, int, int], int] = {}
        # Whether experts are timed by what was measured, so that their number counts.
        self.tabled = self._table is not None or self._cpu_table is not None

    @property
    def remarks(self) -> list[str]:
        """Return where measured times did not reach, one sentence each."""
        return list(self._remarks)

    def dense_ns(self, batch: LayerBatch, layer: int | None = None) -> int:
        """Return the time of the dense part of *batch*, or of a later *layer* of the same step."""
        if (
            batch.context != self._context
            or batch.n_tokens != self._tokens
            or batch.phase != self._phase
        ):  # the layers of a step share all three
            self._context, self._tokens, self._phase = batch.context, batch.n_tokens, batch.phase
            self._of_kind = [-1] * len(self._kinds)
        at = batch.layer if layer is None else layer
        kind = self._kinds[at]
        found = self._of_kind[kind]
        if found < 0:
            key = (kind, batch.phase, batch.n_tokens, batch.context)
            if key not in self._dense_memo:
                self._look_ahead(batch, at)
            found = self._of_kind[kind] = self._dense_memo[key]
        return found

    def _look_ahead(self, batch: LayerBatch, at: int) -> None:
        """Fill the memo for *batch* in layer *at* and, in decode, for the contexts after it.

        The context grows by one entry per token and step, so counting one batch at a time would
        never meet the memo again at the next step.
        """
        if len(self._dense_memo) >= _MEMO_LIMIT:
            self._dense_memo.clear()
        table = self._dense_table[batch.phase]
        if table is not None:  # without looking ahead, which might ask beyond what was measured
            key = (self._kinds[at], batch.phase, batch.n_tokens, batch.context)
            self._dense_memo[key] = self._measured_dense(table, batch, at) + self._host[at]
            return
        steps = _LOOK_AHEAD if batch.phase == DECODE else 1
        contexts = batch.context + batch.n_tokens * np.arange(steps)
        layer, phase, tokens = (np.full(steps, x) for x in (at, batch.phase, batch.n_tokens))
        work = self.dense.of(layer, phase, tokens, contexts)
        kind = self._kinds[at]
        rows = zip(contexts.tolist(), work.ops.tolist(), work.nbytes.tolist(), strict=True)
        for context, ops, nbytes in rows:
            key = (kind, batch.phase, batch.n_tokens, context)
            self._dense_memo[key] = self._main.ns(ops, nbytes) + self._host[at]

    def _measured_dense(self, table: Surface, batch: LayerBatch, at: int) -> int:
        """Return the measured time of what layer *at* stands for, in ns.

        The model's layers that it stands for share its bytes equally; the output head, which sees
        one token in prefill, is what its bytes add to one of them. What a predictor reads in decode
        counts as more weights.
        """
        dense, tokens = self.dense, batch.n_tokens
        spans, head = int(dense.model_layers[at]), int(dense.head_bytes[at])
        nbytes = int(dense.weight_bytes[at]) - head
        if batch.phase == DECODE:
            nbytes += int(dense.decode_bytes[at])
        each, seen = Fraction(nbytes, spans), dense.mean_context(at, tokens, batch.context)
        took = spans * table.at(each, tokens, seen)
        if head:
            wanted = tokens if batch.phase == DECODE else 1
            took += table.at(each + head, wanted, seen) - table.at(each, wanted, seen)
        return ceil(took)

    def expert_ns(self, plan: LayerPlan) -> tuple[int, int]:
        """Return the time of a batch's experts on the main processor, and on the CPU."""
        layout = self.layout
        total, assigned = layout.layer_size(plan.needed), len(plan.batch.experts)
        if plan.degrade or plan.spared:
            total -= layout.size(plan.degrade) + plan.spared
        count = self._computed(plan) if self.tabled else 0
        if not plan.cpu and not plan.skip:
            return self.experts(total, assigned, count), 0
        cpu_bytes = layout.size(plan.cpu)
        main = self.experts(
            total - cpu_bytes - layout.size(plan.skip),
            assigned - plan.cpu_assignments - plan.skip_assignments,
            count,
        )
        return main, self._on_cpu(plan, cpu_bytes) if plan.cpu else 0

    def _computed(self, plan: LayerPlan) -> int:
        """Return how many experts of a batch the main processor computes."""
        return computed_experts(plan.needed, [*plan.cpu, *plan.skip], self.layout.n_parts)

    def _on_cpu(self, plan: LayerPlan, nbytes: int) -> int:
        """Return the time of the experts of a batch that the CPU computes, from *nbytes* bytes."""
        assert self._cpu is not None  # checked when the run was set up
        assigned = plan.cpu_assignments
        if self._cpu_table is None:
            return self._cpu.ns(assigned * self.expert_ops, nbytes)
        count = computed_experts(plan.cpu, (), self.layout.n_parts)
        return self._cpu.overhead + _of_many(self._cpu_table, nbytes, assigned, count)

    def per_expert(self, plan: LayerPlan, total: int) -> tuple[int, list[ExpertPart]]:
        """Share out *total*, the time of a batch's experts on the main processor, among them.

        Returns the overhead of the call, which is paid once, and one part per expert in plan order.
        What bounds the whole batch, bytes or operations, is what each expert has its share of, or
        its measured time; the shares are rounded so that they and the overhead add up to *total*.
        """
        layout, size = self.layout, self.layout.nbytes
        elsewhere = {*plan.cpu, *plan.skip, *plan.degrade}
        slices: dict[int, list[int]] = {}
        for s in plan.needed:
            if s not in elsewhere:
                slices.setdefault(layout.expert_of(s), []).append(s)
        counts = Counter(plan.batch.experts)
        assigned = {e: counts[e] for e in slices}
        nbytes = {e: sum([size[s] for s in parts]) for e, parts in slices.items()}
        ops = sum(assigned.values()) * self.expert_ops
        by_ops = self._main.bound_by_ops(ops, sum(nbytes.values()) - plan.spared)
        weights: Mapping[int, int | Fraction] = assigned if by_ops else nbytes
        if self._table is not None:
            weights = {e: self._table.at(nbytes[e], assigned[e]) for e in slices}
        whole, overhead = sum(weights.values()), min(total, self._main.overhead)
        given, seen = 0, whole * 0
        found = []
        for e, parts in slices.items():
            seen += weights[e]
            upto = (total - overhead) * seen // whole
            found.append(ExpertPart(e, parts, upto - given))
            given = upto
        return overhead, found

    def experts(self, nbytes: int, assigned: int, count: int = 0) -> int:
        """Return the time of *assigned* (token, expert) pairs whose weights take *nbytes* bytes.

        *count* is the number of different experts; only measured times depend on it.
        """
        if self._table is not None:
            key = (nbytes, assigned, count)
            if key not in self._table_memo:
                if len(self._table_memo) >= _MEMO_LIMIT:
                    self._table_memo.clear()
                took = self._main.overhead + _of_many(self._table, *key) if assigned else 0
                self._table_memo[key] = took
            return self._table_memo[key]
        found = self._expert_memo.get((nbytes, assigned))
        if found is not None:
            return found
        if len(self._expert_memo) >= _MEMO_LIMIT:
            self._expert_memo.clear()
        took = self._main.ns(assigned * self.expert_ops, nbytes) if assigned else 0
        self._expert_memo[nbytes, assigned] = took
        return took


def _of_many(table: Surface, nbytes: int, assigned: int, count: int) -> int:
    """Return the time of *count* experts together, by what one takes."""
    return ceil(count * table.at(Fraction(nbytes, count), Fraction(assigned, count)))


class Roofline:
    """A processor and the memory it computes from."""

    def __init__(self, compute: Compute, bandwidth: int, dtype: str) -> None:
        """Take the processor's peak for *dtype*, and *bandwidth* in bytes/s."""
        self._peak, self._bandwidth = compute.peak_of(dtype), bandwidth
        self.overhead = compute.overhead

    def ns(self, ops: int, nbytes: int) -> int:
        """Return the time of *ops* operations over *nbytes* bytes, rounded up."""
        second = 1_000_000_000
        compute, memory = (
            ceil_div(ops * second, self._peak),
            ceil_div(nbytes * second, self._bandwidth),
        )
        return max(compute, memory) + self.overhead

    def bound_by_ops(self, ops: int, nbytes: int) -> bool:
        """Return whether *ops* operations take longer than reading *nbytes* bytes."""
        return ops * self._bandwidth > nbytes * self._peak


def _kinds(dense: DenseWork) -> list[int]:
    """Number the layers by their costs, so that equal layers share one entry of the memo."""
    rows = zip(
        *(
            x.tolist()
            for x in (
                dense.weight_bytes,
                dense.token_ops,
                dense.head_ops,
                dense.context_ops,
                dense.window_ops,
                dense.context_bytes,
                dense.window_bytes,
                dense.model_layers,
            )
        ),
        strict=True,
    )
    seen: dict[tuple[int, ...], int] = {}
    return [seen.setdefault(row, len(seen)) for row in rows]
