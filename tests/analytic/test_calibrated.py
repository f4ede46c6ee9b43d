"""Whole runs on measured times: what a batch takes, from both sides, on all machines.

An expert of 40 bytes takes 40 ns to copy; measured, it computes in 100 ns on one token.
"""

from typing import Any

import pytest

from moetier.sim.layout import Layout
from moetier.sim.machine.costs import Costs, ExpertPart
from moetier.sim.machine.hierarchy import build_hierarchy
from moetier.sim.machine.work import dense_work
from moetier.sim.plan import LayerPlan
from moetier.sim.testing import toy_header, toy_profile, toy_trace
from moetier.traces.batch import DECODE, LayerBatch

COPY, OVERHEAD, HOST = 40, 7, 3


def expert(nbytes: int, tokens: int, ns: int, kernel: str = "whole") -> dict[str, Any]:
    return {"kernel": kernel, "nbytes": f"{nbytes} B", "tokens": tokens, "time": f"{ns} ns"}


def dense(nbytes: int, context: int, ns: int, **more: Any) -> dict[str, Any]:
    return {"nbytes": f"{nbytes} B", "context": context, "time": f"{ns} ns"} | more


EXPERTS = [expert(40, 1, 100), expert(40, 3, 160), expert(80, 1, 150), expert(80, 3, 300)]
DENSE = [dense(10, 1, 20), dense(10, 11, 40), dense(30, 1, 60), dense(30, 11, 80)]


def machine(**gpu: Any) -> Any:
    given = {"experts": EXPERTS, "dense": DENSE, "overhead": f"{OVERHEAD} ns"}
    return toy_profile(gpu=given | {"host_time_per_layer": f"{HOST} ns"} | gpu)


def test_a_batch_takes_its_overhead_and_each_expert_its_time(play: Any) -> None:
    trace = toy_trace(toy_header(top_k=2), [[[0, 1]], [[2]]])
    seen = play(trace, machine(), capacity={"hbm": 160})

    assert seen.column("expert_ns") == [OVERHEAD + 2 * 100, OVERHEAD + 100]
    assert seen.column("dense_ns") == [HOST + 20, HOST + 22]  # contexts of 1 and 2
    assert seen.result.elapsed_ns == sum(seen.column("expert_ns")) + 48 + 3 * COPY


@pytest.mark.parametrize(("size", "took"), [(40, 100), (41, 102), (60, 125), (80, 150), (81, 152)])
def test_time_goes_by_the_bytes_of_an_expert_and_is_rounded_up(
    play: Any, size: int, took: int
) -> None:
    """5/4 ns a byte from 40 B on, 150/80 beyond 80 B; what is not whole is rounded up once."""
    seen = play(toy_trace(toy_header(size), [[[0]]]), machine(), capacity={"hbm": 160})

    assert seen.column("expert_ns") == [OVERHEAD + took]


def test_tokens_of_a_batch_share_its_experts(play: Any) -> None:
    """Three tokens on two experts are 1.5 each: 100 + 60 / 2 x 0.5."""
    trace = toy_trace(toy_header(), [[[[0]], [[0]], [[1]]]])
    seen = play(trace, machine(), capacity={"hbm": 160})

    assert seen.column("expert_ns") == [OVERHEAD + 2 * 115]


def test_an_expert_is_ready_when_it_has_computed_and_not_before(play: Any) -> None:
    """The copy of layer 1 begins with its batch: after copy, overhead and time of layer 0."""
    trace = toy_trace(toy_header(layers=2), [[[0], [0]]])
    seen = play(trace, machine(), capacity={"hbm": 160})

    assert seen.column("start_ns") == [0, HOST + 20 + COPY + OVERHEAD + 100]


@pytest.mark.parametrize(("cpu", "one"), [({}, 40), ({"experts": [expert(40, 1, 900)]}, 900)])
def test_what_the_cpu_computes_takes_its_own_times(
    bench: Any, cpu: dict[str, Any], one: int
) -> None:
    """Two experts here, one there: by a roofline, 40 bytes at one a nanosecond, or as measured."""
    gpu = {"experts": EXPERTS, "dense": DENSE, "overhead": "7 ns"}
    profile = toy_profile(gpu=gpu, cpu=cpu | {"overhead": "5 ns"})
    model = toy_header(n_experts=16)
    timing = bench(profile, model).batch(hits=[0, 1], cpu=[2])

    assert timing.experts == OVERHEAD + 2 * 100
    assert timing.end == 20 + max(OVERHEAD + 200, 5 + one)
    assert bench(profile, model).batch(cpu=[2]).experts == 0


def test_what_is_skipped_is_not_computed(bench: Any) -> None:
    timing = bench(machine(), toy_header(n_experts=16)).batch(
        hits=[0, 1, 2], skip=[1], skip_assignments=1
    )

    assert timing.experts == OVERHEAD + 2 * 100


def test_bytes_that_compute_does_not_read_take_no_time(bench: Any) -> None:
    timing = bench(machine(), toy_header(n_experts=16)).batch(hits=[0, 1], spared=20)

    assert timing.experts == OVERHEAD + 2 * 75  # 30 bytes each, below the rows: 3/4 of 100


def test_an_expert_in_two_slices_beside_one_in_one_takes_what_both_take() -> None:
    """80 bytes and 40 bytes: 150 + 100 ns, and with overlap each its own."""
    header = toy_header(80, n_experts=4)
    layout = Layout([[40, 40]], 4, bit_sliced=True)
    costs = Costs(build_hierarchy(machine()), dense_work(header, "bf16"), layout, 1)
    plan = LayerPlan(LayerBatch(0, DECODE, 0, 1, 1, [0, 1]), [0, 1, 2], [])
    total, _ = costs.expert_ns(plan)

    assert total == OVERHEAD + 150 + 100
    assert costs.per_expert(plan, total) == (
        OVERHEAD,
        [ExpertPart(0, [0, 1], 150), ExpertPart(1, [2], 100)],
    )


def test_a_kernel_that_was_not_measured_falls_back_to_the_roofline(play: Any) -> None:
    """8 weights at 4 bits in groups of 32 are 5 bytes or so, read at one byte per nanosecond."""
    sizes = {"hidden": 8, "moe_intermediate": 4, "heads": 1, "kv_heads": 1, "head_dim": 8}
    trace = toy_trace(toy_header(400, **sizes), [[[0]]])
    setting = {"policy": {"precision": {"kind": "uniform", "bits": 4}}, "capacity": {"hbm": 1600}}
    seen = play(trace, machine(), setting["policy"], capacity=setting["capacity"])
    plain = play(
        trace, toy_profile(gpu={"overhead": "7 ns"}), setting["policy"], capacity={"hbm": 1600}
    )

    assert seen.column("expert_ns") == plain.column("expert_ns")
    assert any("kernel 'codes-4'" in text for text in seen.result.known_limitations)
    assert not any("kernel" in text for text in plain.result.known_limitations)


def test_a_measured_kernel_is_used_for_the_precision_that_names_it(play: Any) -> None:
    sizes = {"hidden": 8, "moe_intermediate": 4, "heads": 1, "kv_heads": 1, "head_dim": 8}
    trace = toy_trace(toy_header(400, **sizes), [[[0]]])
    profile = machine(experts=[expert(400, 1, 1), expert(62, 1, 5000, "codes-4")])
    policy = {"precision": {"kind": "uniform", "bits": 4}}
    seen = play(trace, profile, policy, capacity={"hbm": 1600})
    size = seen.column("fetch_bytes")[0]

    assert seen.column("expert_ns") == [OVERHEAD + -(-5000 * size // 62)]


def test_prefill_without_rows_is_a_roofline_and_said(play: Any) -> None:
    seen = play(toy_trace(toy_header(), [[[0]]], [[[0]], [[1]]]), machine(), capacity={"hbm": 160})

    assert seen.column("dense_ns") == [10 + OVERHEAD + HOST, HOST + 24]
    assert any("no times of prefill" in text for text in seen.result.known_limitations)


def test_prefill_has_its_own_rows(play: Any) -> None:
    rows = [*DENSE, dense(10, 3, 500, phase="prefill", tokens=2)]
    trace = toy_trace(toy_header(), [[[0]]], [[[0]], [[1]]])
    seen = play(trace, machine(dense=rows), capacity={"hbm": 160})

    assert seen.column("dense_ns") == [500 + HOST, HOST + 24]


def test_the_output_head_sees_one_token_of_a_prompt(play: Any) -> None:
    """A head of 2 x 8 x 10 bytes beside 10 of the layer adds 80 ns, whatever the prompt."""
    rows = [dense(10, 3, 20), dense(170, 3, 100)]
    rows += [dense(10, 1, 20, phase="prefill"), dense(10, 3, 500, phase="prefill", tokens=2)]
    rows += [dense(170, 1, 100, phase="prefill")]
    header = toy_header(hidden=8, vocab=10)
    seen = play(
        toy_trace(header, [[[0]]], [[[0]], [[1]]]), machine(dense=rows), capacity={"hbm": 160}
    )

    assert seen.column("dense_ns") == [HOST + 500 + 80, HOST + 100]


def test_extrapolation_is_said_only_where_it_happened(play: Any) -> None:
    within = play(toy_trace(toy_header(), [[[0]]]), machine(), capacity={"hbm": 160})
    beyond = play(toy_trace(toy_header(81), [[[0]]]), machine(), capacity={"hbm": 400})

    assert not any("extrapolated" in text for text in within.result.known_limitations)
    assert [text for text in beyond.result.known_limitations if "extrapolated" in text] == [
        "times of experts on the processor of tier 'hbm' are extrapolated beyond the measured "
        "sizes (40 to 80 B)"
    ]


def test_layers_without_experts_each_take_their_time(play: Any) -> None:
    """Two model layers of 10 bytes each stand behind one MoE layer of 20."""
    header = toy_header(dense_bytes=[10])
    geometry = header.geometry.model_copy(update={"moe_layers": [1], "n_layers": 2})
    both = header.model_copy(update={"geometry": geometry, "dense_layer_bytes": [10]})
    seen = play(toy_trace(both, [[[0]]]), machine(), capacity={"hbm": 160})

    assert seen.column("dense_ns") == [2 * 20 + 2 * HOST]


def test_experts_that_overlap_share_the_time_of_the_batch(play: Any) -> None:
    trace = toy_trace(toy_header(top_k=2), [[[0, 1]], [[0, 1]]])
    seen = play(trace, machine(), capacity={"hbm": 160}, overlap=True)

    assert seen.column("expert_ns") == [OVERHEAD + 200] * 2
    assert seen.column("wait_ns") == [COPY, 0]  # the second copy lands while the first computes


def test_the_window_of_a_prefetch_is_measured_too(play: Any) -> None:
    """Copies of 40 ns fit into the 122 ns that a layer was measured to take, not into its 50."""
    header = toy_header(layers=3, n_experts=8)
    trace = toy_trace(header, [[[t], [t + 1], [t + 2]] for t in range(4)])
    policy = {"prefetch": "oracle"}
    seen = play(trace, machine(), policy, capacity={"hbm": 240})
    plain = play(trace, toy_profile(), policy, capacity={"hbm": 240})

    assert sum(seen.column("wait_ns")[1:]) <= sum(plain.column("wait_ns")[1:])
