"""Costs of compute and of the dense part: sums, spans of layers, a memo that changes nothing."""

from typing import Any

import numpy as np
import pytest

from moetier.sim.machine.costs import Costs
from moetier.sim.machine.hierarchy import build_hierarchy
from moetier.sim.machine.work import dense_work, kv_bytes_at
from moetier.sim.memory import extent_of
from moetier.sim.plan import LayerPlan
from moetier.sim.run import Setting, set_up
from moetier.sim.testing import run, toy_header, toy_profile, toy_trace
from moetier.traces.batch import DECODE, PREFILL, LayerBatch
from moetier.traces.errors import InputError
from moetier.traces.formats import dense_bytes, dense_layer_bytes, head_bytes
from moetier.traces.geometry import Geometry
from moetier.traces.schema import Header, Provenance

SIZES: dict[str, Any] = {
    "hidden": 32, "moe_intermediate": 16, "dense_intermediate": 64, "heads": 4, "kv_heads": 2,
    "head_dim": 8, "vocab": 100, "n_experts": 4, "top_k": 2,
}  # fmt: skip


def header_of(moe_layers: list[int], n_layers: int, **more: Any) -> Header:
    geometry = Geometry(name="toy", moe_layers=moe_layers, n_layers=n_layers, **SIZES, **more)
    return Header(geometry=geometry, provenance=Provenance(kind="synthetic"))


def test_layers_without_experts_belong_to_the_moe_layer_after_them() -> None:
    """Layers 0 and 1 go with 2; 3 is an MoE layer; 4 and 5 come after the last, 3."""
    header = header_of([2, 3], 6)
    geometry = header.geometry
    moe, dense = dense_bytes(geometry, "bf16"), dense_layer_bytes(geometry, "bf16")
    work = dense_work(header, "bf16")

    assert len(dense) == 4
    assert work.weight_bytes.tolist() == [
        moe[0] + dense[0] + dense[1],
        moe[1] + dense[2] + dense[3] + head_bytes(geometry, "bf16"),
    ]
    # two operations per weight, which is a bf16 byte each; the head once per wanted logit
    assert work.token_ops.tolist() == [
        moe[0] + dense[0] + dense[1],
        moe[1] + dense[2] + dense[3],
    ]
    assert work.head_ops.tolist() == [0, 2 * 32 * 100]


def test_every_layer_reads_its_own_keys_and_values() -> None:
    """An entry takes 2 x 2 heads x 8 numbers of 2 bytes: 64 bytes; scores and values 4 x 4 x 8."""
    work = dense_work(header_of([2, 3], 6), "bf16")

    assert work.context_bytes.tolist() == [3 * 64, 3 * 64]
    assert work.context_ops.tolist() == [3 * 128, 3 * 128]
    assert kv_bytes_at(work, context=30, requests=3) == 3 * 10 * 6 * 64


def test_sliding_layers_stop_at_the_window() -> None:
    header = header_of([0, 1], 2, sliding_window=5, attention=["full", "sliding"])
    work = dense_work(header, "bf16")

    assert (work.context_bytes.tolist(), work.window_bytes.tolist()) == ([64, 0], [0, 64])
    assert kv_bytes_at(work, 3, 1) == 6 * 64
    assert kv_bytes_at(work, 100, 1) == 105 * 64


def test_prefill_computes_every_token_and_one_set_of_logits() -> None:
    work = dense_work(header_of([0], 1), "bf16")
    one = np.array([0])

    def of(phase: int, tokens: int, context: int) -> tuple[int, int]:
        found = work.of(one, np.array([phase]), np.array([tokens]), np.array([context]))
        return int(found.ops[0]), int(found.nbytes[0])

    token, head, entry = int(work.token_ops[0]), int(work.head_ops[0]), 128
    weights = int(work.weight_bytes[0])
    assert of(PREFILL, 3, 6) == (3 * token + head + 6 * entry, weights + 3 * 64)
    assert of(DECODE, 3, 60) == (3 * (token + head) + 60 * entry, weights + 60 * 64)


def test_recorded_bytes_come_before_those_of_the_geometry() -> None:
    header = header_of([0, 1], 2).model_copy(update={"dense_bytes": [5, 6], "weights": "bf16"})
    head = head_bytes(header.geometry, "bf16")

    assert dense_work(header, "bf16").weight_bytes.tolist() == [5, 6 + head]
    assert dense_work(header, "int8").weight_bytes[0] == dense_bytes(header.geometry, "int8")[0]


def test_a_dense_part_of_unknown_size_is_refused() -> None:
    nothing = toy_header().model_copy(update={"dense_bytes": None})
    with pytest.raises(InputError, match="the size of the dense part of 'toy' is unknown"):
        dense_work(nothing, "bf16")


def test_the_memo_gives_what_a_fresh_count_gives() -> None:
    """Contexts beyond the look-ahead, in no order, and equal layers that share an entry."""
    header = header_of([0, 1, 2], 3)
    hierarchy = build_hierarchy(toy_profile())
    trace = toy_trace(toy_header(layers=3, top_k=2), [[[0, 1]] * 3])
    layout = set_up(trace.header, Setting(toy_profile()), extent_of(trace)).layout
    work = dense_work(header, "bf16")
    shared = Costs(hierarchy, work, layout, 1)
    for context in (7, 300, 8, 263, 262, 7, 100_000):
        for layer in (2, 0, 1):
            for phase in (PREFILL, DECODE):
                batch = LayerBatch(0, phase, layer, 2, context, [0, 1])
                fresh = Costs(hierarchy, work, layout, 1)

                assert shared.dense_ns(batch) == fresh.dense_ns(batch)


def test_a_full_memo_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy_header(hidden=8, moe_intermediate=1, heads=1, kv_heads=1, head_dim=8)
    trace = toy_trace(model, [[[e]] for e in (0, 1, 2, 0, 1, 2)] * 3)
    before = run(trace, toy_profile(), capacity={"hbm": 80}).digest
    monkeypatch.setattr("moetier.sim.machine.costs._MEMO_LIMIT", 1)
    monkeypatch.setattr("moetier.sim.machine.costs._LOOK_AHEAD", 2)

    assert run(trace, toy_profile(), capacity={"hbm": 80}).digest == before


def test_a_batch_of_nothing_takes_no_expert_time() -> None:
    trace = toy_trace(toy_header(), [[[0]]])
    costs = set_up(trace.header, Setting(toy_profile()), extent_of(trace)).costs
    plan = LayerPlan(LayerBatch(0, DECODE, 0, 1, 1, []), [], [])

    assert costs.expert_ns(plan) == (0, 0)


def test_a_peak_may_depend_on_the_format() -> None:
    """Experts computed in bf16 use that peak; a processor without it is refused by name."""
    model = toy_header(hidden=8, moe_intermediate=1)
    trace = toy_trace(model, [[[0]]])
    slow = toy_profile(gpu={"peak": {"bf16": "1 GOP/s", "int8": "9 GOP/s"}})
    assert run(trace, slow).column("expert_ns") == [48]

    with pytest.raises(InputError, match="no peak for 'bf16' on the processor of tier 'hbm'"):
        run(trace, toy_profile(gpu={"peak": {"int8": "9 GOP/s"}}))
