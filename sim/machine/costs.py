"""This module says how long compute takes: a roofline over what the work counts.

    time = max(operations / peak, bytes / bandwidth) + overhead

rounded up to whole nanoseconds, for the dense part and for the experts of a batch each. The host
time per layer of the profile, what the host program spends between kernels, is part of the dense
part, once for every layer of the model that a MoE layer stands for.
"""

from __future__ import annotations

import numpy as np

from moetier.sim.hardware import Compute
from moetier.sim.layout import Layout
from moetier.sim.machine.hierarchy import Hierarchy
from moetier.sim.machine.work import DenseWork
from moetier.sim.plan import LayerPlan
from moetier.sim.units import ceil_div
from moetier.traces.batch import DECODE, LayerBatch

_MEMO_LIMIT = 65536  # entries; the context grows with every token, so the memo must not
_LOOK_AHEAD = 256  # decode steps


class Costs:
    """The compute times of one model on one machine, in ns."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        dense: DenseWork,
        layout: Layout,
        expert_ops: int,
        dtype: str = "bf16",
    ) -> None:
        """Take *expert_ops*, the operations of one expert on one token; 0 where unknown."""
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
        steps = _LOOK_AHEAD if batch.phase == DECODE else 1
        contexts = batch.context + batch.n_tokens * np.arange(steps)
        layer, phase, tokens = (np.full(steps, x) for x in (at, batch.phase, batch.n_tokens))
        work = self.dense.of(layer, phase, tokens, contexts)
        kind = self._kinds[at]
        rows = zip(contexts.tolist(), work.ops.tolist(), work.nbytes.tolist(), strict=True)
        for context, ops, nbytes in rows:
            key = (kind, batch.phase, batch.n_tokens, context)
            self._dense_memo[key] = self._main.ns(ops, nbytes) + self._host[at]

    def expert_ns(self, plan: LayerPlan) -> tuple[int, int]:
        """Return the time of a batch's experts on the main processor, and on the CPU."""
        layout = self.layout
        total, assigned = layout.layer_size(plan.needed), len(plan.batch.experts)
        if plan.degrade or plan.spared:
            total -= layout.size(plan.degrade) + plan.spared
        if not plan.cpu and not plan.skip:
            return self.experts(total, assigned), 0
        cpu_bytes = layout.size(plan.cpu)
        main = self.experts(
            total - cpu_bytes - layout.size(plan.skip),
            assigned - plan.cpu_assignments - plan.skip_assignments,
        )
        if not plan.cpu:
            return main, 0
        assert self._cpu is not None  # checked when the run was set up
        return main, self._cpu.ns(plan.cpu_assignments * self.expert_ops, cpu_bytes)

    def experts(self, nbytes: int, assigned: int) -> int:
        """Return the time of *assigned* (token, expert) pairs whose weights take *nbytes* bytes."""
        found = self._expert_memo.get((nbytes, assigned))
        if found is not None:
            return found
        if len(self._expert_memo) >= _MEMO_LIMIT:
            self._expert_memo.clear()
        took = self._main.ns(assigned * self.expert_ops, nbytes) if assigned else 0
        self._expert_memo[nbytes, assigned] = took
        return took


class Roofline:
    """A processor and the memory it computes from."""

    def __init__(self, compute: Compute, bandwidth: int, dtype: str) -> None:
        """Take the processor's peak for *dtype*, and *bandwidth* in bytes/s."""
        self._peak, self._bandwidth = compute.peak_of(dtype), bandwidth
        self._overhead = compute.overhead

    def ns(self, ops: int, nbytes: int) -> int:
        """Return the time of *ops* operations over *nbytes* bytes, rounded up."""
        second = 1_000_000_000
        compute, memory = (
            ceil_div(ops * second, self._peak),
            ceil_div(nbytes * second, self._bandwidth),
        )
        return max(compute, memory) + self._overhead


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
            )
        ),
        strict=True,
    )
    seen: dict[tuple[int, ...], int] = {}
    return [seen.setdefault(row, len(seen)) for row in rows]
