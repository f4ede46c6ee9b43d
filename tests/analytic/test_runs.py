"""Whole runs whose answer is a formula: copies, overlap, batches, context, compute and skips.

An expert of 40 bytes takes 40 ns to copy and, reading one byte per nanosecond, 40 ns to compute;
the dense part of a layer takes 10 ns.
"""

from typing import Any

import pytest

from moetier.sim.testing import toy_header, toy_profile, toy_trace

DENSE, COPY, COMPUTE = 10, 40, 40


@pytest.mark.parametrize("n", [1, 2, 5])
def test_without_reuse_every_token_copies_and_then_computes(play: Any, n: int) -> None:
    trace = toy_trace(toy_header(n_experts=5), [[[e]] for e in range(n)])
    seen = play(trace, toy_profile(), capacity={"hbm": 40})

    assert seen.result.elapsed_ns == n * (DENSE + COPY + COMPUTE)
    assert seen.column("wait_ns") == [COPY] * n
    assert seen.metrics["miss_rate"] == 1


def test_a_cache_that_holds_everything_copies_each_slice_once(play: Any) -> None:
    tokens = [[[e]] for e in (0, 1, 0, 2, 1, 0, 3, 3)]
    seen = play(toy_trace(toy_header(n_experts=4), tokens), toy_profile(), capacity={"hbm": 160})

    assert seen.column("misses") == [1, 1, 0, 1, 0, 0, 1, 0]
    assert seen.column("misses") == seen.column("compulsory")
    assert seen.result.elapsed_ns == 8 * (DENSE + COMPUTE) + 4 * COPY


@pytest.mark.parametrize(
    ("capacity", "hits"),
    [(40, [0, 0, 0, 0, 0, 0]), (79, [0, 0, 0, 0, 0, 0]), (80, [0, 0, 1, 0, 0, 1])],
)
def test_an_expert_hits_from_the_byte_on_that_holds_it(
    play: Any, capacity: int, hits: list[int]
) -> None:
    """0 1 0 2 1 1 under LRU: two experts fit from 80 bytes on; the last repeat always hits."""
    tokens = [[[e]] for e in (0, 1, 0, 2, 1, 2)]
    seen = play(
        toy_trace(toy_header(n_experts=4), tokens), toy_profile(), capacity={"hbm": capacity}
    )

    assert [1 - missed for missed in seen.column("misses")] == hits


@pytest.mark.parametrize("copy", [4, 19, 20, 21, 40])
def test_perfect_prefetch_hides_the_shorter_of_copy_and_compute(play: Any, copy: int) -> None:
    """Each layer's copy runs beside the layer before, of 20 ns: 10 dense and 10 for its expert."""
    layers, tokens = 3, 6
    model = toy_header(40, layers=layers, n_experts=8, dense_bytes=40)
    trace = toy_trace(model, [[[t] for _ in range(layers)] for t in range(tokens)])
    fast = toy_profile(hbm={"bandwidth": "4 GB/s"}, bandwidth="40 GB/s", latency=f"{copy - 1} ns")
    seen = play(trace, fast, {"prefetch": "oracle"}, capacity={"hbm": 80})

    busy = 20
    assert seen.column("expert_ns") == [10] * layers * tokens
    assert seen.column("wait_ns")[0] == copy
    assert seen.column("wait_ns")[1:] == [max(0, copy - busy)] * 17
    steady = seen.column("end_ns")[-1] - seen.column("end_ns")[4]
    assert steady == 13 * max(copy, busy)


def test_tokens_in_lockstep_fetch_a_shared_expert_once(play: Any) -> None:
    model = toy_header(n_experts=4, top_k=2)
    trace = toy_trace(model, [[[[0, 1]], [[1, 2]], [[1, 0]]]])
    seen = play(trace, toy_profile(), capacity={"hbm": 160})

    assert (seen.column("lookups"), seen.column("misses")) == ([3], [3])
    assert seen.column("assignments") == [6]
    assert seen.column("wait_ns") == [3 * COPY]
    assert seen.column("expert_ns") == [3 * COMPUTE]
    assert seen.plans[0].fetch == [0, 1, 2]  # in order of first use


def test_the_last_use_in_a_batch_decides_recency(play: Any) -> None:
    """After 0 1, 1 2, 1 0 the order is 2 1 0, oldest first; 2 is used again, so 1 goes for 3."""
    model = toy_header(n_experts=4, top_k=2)
    trace = toy_trace(model, [[[[0, 1]], [[1, 2]], [[1, 0]]], [[2, 3]], [[0, 3]]])
    seen = play(trace, toy_profile(), capacity={"hbm": 120})

    assert seen.column("misses") == [3, 1, 0]
    assert [list(plan.evicted) for plan in seen.plans] == [[], [1], []]


def test_prefill_is_one_batch_per_layer(play: Any) -> None:
    model = toy_header(layers=2, n_experts=4)
    prompt = [[[0], [3]], [[1], [3]], [[0], [2]]]
    seen = play(
        toy_trace(model, [[[1], [2]]], prefill=prompt), toy_profile(), capacity={"hbm": 320}
    )

    assert seen.column("phase") == [0, 0, 1, 1]
    assert seen.column("tokens") == [3, 3, 1, 1]
    assert seen.column("lookups") == [2, 2, 1, 1]
    assert seen.column("context") == [1 + 2 + 3, 6, 4, 4]
    assert seen.metrics["ttft_ms"] == 2 * (DENSE + 2 * COPY + 2 * COMPUTE) / 1e6
    assert seen.metrics["prefill_tokens"] == 3
    assert seen.metrics["miss_rate_prefill"] == 1
    assert seen.metrics["hit_rate_decode"] == 1


def test_a_prefill_larger_than_the_cache_passes_through(play: Any) -> None:
    """All four experts are resident while they compute; then one remains, and the peak says so."""
    prompt = [[[e]] for e in range(4)]
    trace = toy_trace(toy_header(n_experts=4), [[[3]], [[0]]], prefill=prompt)
    seen = play(trace, toy_profile(), capacity={"hbm": 40})

    assert seen.column("peak_bytes") == [160, 160, 80]
    assert seen.column("resident_bytes") == [160, 40, 40]
    assert seen.metrics["peak_bytes"] == 160


# -- context: an entry of the key/value cache takes 2 x 2 x 1 head x 8 = 32 bytes


def attending(**more: Any) -> Any:
    sizes: dict[str, Any] = {"hidden": 8, "heads": 1, "kv_heads": 1, "head_dim": 8} | more
    return toy_header(layers=1, n_experts=2, moe_intermediate=1, dense_bytes=100, **sizes)


FAST_MATHS = {"peak": "1000 TOP/s"}


def test_decode_reads_the_whole_context(play: Any) -> None:
    """Each token takes exactly one entry longer, at one byte per nanosecond."""
    trace = toy_trace(attending(), [[[0]]] * 5, prefill=[[[0]]] * 3)
    seen = play(trace, toy_profile(gpu=FAST_MATHS), capacity={"hbm": 40})

    assert seen.column("dense_ns")[0] == 100 + 3 * 32  # prefill writes its own
    assert seen.column("dense_ns")[1:] == [100 + 32 * entries for entries in (4, 5, 6, 7, 8)]


def test_key_value_numbers_may_be_smaller(play: Any) -> None:
    trace = toy_trace(attending(), [[[0]]] * 3)
    seen = play(trace, toy_profile(gpu=FAST_MATHS), capacity={"hbm": 40}, kv_bytes=1)

    assert seen.column("dense_ns") == [116, 132, 148]


def test_a_sliding_window_stops_growing(play: Any) -> None:
    model = attending(sliding_window=3, attention=["sliding"])
    seen = play(toy_trace(model, [[[0]]] * 6), toy_profile(gpu=FAST_MATHS), capacity={"hbm": 40})

    assert seen.column("dense_ns") == [132, 164, 196, 196, 196, 196]


def test_latent_attention_reads_one_joint_entry(play: Any) -> None:
    model = attending(kv_lora=6, rope_dim=4)
    seen = play(toy_trace(model, [[[0]]] * 3), toy_profile(gpu=FAST_MATHS), capacity={"hbm": 40})

    assert seen.column("dense_ns") == [120, 140, 160]


def test_requests_in_lockstep_each_read_their_context(play: Any) -> None:
    trace = toy_trace(attending(), [[[[0]], [[1]]]] * 2)
    seen = play(trace, toy_profile(gpu=FAST_MATHS), capacity={"hbm": 80})

    assert seen.column("context") == [2, 4]
    assert seen.column("dense_ns") == [164, 228]


# -- compute: 2 x 3 x 8 = 48 operations of an expert on a token, over 40 bytes


@pytest.mark.parametrize(
    ("peak", "tokens", "expert_ns"),
    [
        ("1 GOP/s", 1, 48),  # compute-bound
        ("2 GOP/s", 1, 40),  # memory-bound
        ("1200 MOP/s", 1, 40),  # where both lines of the roofline meet
        ("1199 MOP/s", 1, 41),
        ("2 GOP/s", 2, 48),  # two tokens over the same bytes
        ("48 GOP/s", 5, 40),
    ],
)
def test_experts_follow_the_roofline(play: Any, peak: str, tokens: int, expert_ns: int) -> None:
    model = toy_header(n_experts=2, hidden=8, moe_intermediate=1)
    seen = play(
        toy_trace(model, [[[[0]]] * tokens]), toy_profile(gpu={"peak": peak}), capacity={"hbm": 40}
    )

    assert seen.column("expert_ns") == [expert_ns]


@pytest.mark.parametrize(("peak", "dense_ns"), [(1, 36), (2, 18), (3, 14), (9, 14)])
def test_the_dense_part_follows_the_roofline(play: Any, peak: int, dense_ns: int) -> None:
    """Operations are 2 per dense weight; the bytes are 10 stored and 4 of one key and value."""
    model = toy_header(
        layers=1, n_experts=2, hidden=2, moe_intermediate=1, heads=1, kv_heads=1, head_dim=1
    )
    gpu = {"peak": f"{peak} GOP/s"}
    seen = play(toy_trace(model, [[[0]]]), toy_profile(gpu=gpu), capacity={"hbm": 40})

    # weights: attention 4 x 2, router 2 x 2, norms 2 x 2; then 4 operations on one key and value
    assert 2 * (8 + 4 + 4) + 4 == 36
    assert seen.column("dense_ns") == [dense_ns]


@pytest.mark.parametrize(("host", "overhead"), [(0, 0), (7, 0), (0, 5), (7, 5)])
def test_host_time_is_paid_per_layer_and_overhead_per_part(
    play: Any, host: int, overhead: int
) -> None:
    gpu = {"host_time_per_layer": f"{host} ns", "overhead": f"{overhead} ns"}
    trace = toy_trace(toy_header(layers=3), [[[0], [0], [0]]] * 2)
    seen = play(trace, toy_profile(gpu=gpu), capacity={"hbm": 480})

    assert seen.column("dense_ns") == [DENSE + host + overhead] * 6
    assert seen.column("expert_ns") == [COMPUTE + overhead] * 6
    assert seen.result.elapsed_ns == 6 * (DENSE + COMPUTE + host + 2 * overhead) + 3 * COPY


# -- what is skipped moves no bytes and takes no time


def test_a_skipped_expert_costs_nothing(play: Any) -> None:
    trace = toy_trace(toy_header(n_experts=4, top_k=2), [[[0, 1]], [[2, 3]]], prefill=[[[0, 1]]])
    seen = play(trace, toy_profile(), {"miss": "skip"}, capacity={"hbm": 80})

    assert seen.column("skipped") == [0, 0, 2]
    assert seen.column("fetch_bytes") == [80, 0, 0]
    assert seen.column("assignments") == [2, 2, 0]
    assert seen.column("expert_ns") == [80, 80, 0]
    assert seen.column("wait_ns") == [80, 0, 0]
    assert seen.metrics["skipped_share"] == 2 / 4
    assert seen.metrics["lossless"] is False


def test_of_the_missing_a_few_may_be_kept(play: Any) -> None:
    trace = toy_trace(toy_header(n_experts=4, top_k=3), [[[0, 1, 2]], [[0, 1, 3]]])
    seen = play(trace, toy_profile(), {"miss": {"kind": "skip", "keep": 1}}, capacity={"hbm": 120})

    assert seen.column("skipped") == [2, 1]
    assert [plan.fetch for plan in seen.plans] == [[0], [1]]


def test_experts_with_many_tokens_are_fetched_and_the_rest_computed_below(play: Any) -> None:
    step = [[[0, 1]], [[0, 2]], [[0, 3]]]
    model = toy_header(n_experts=4, top_k=2)
    policy = {"miss": {"kind": "cpu", "max_tokens": 2}}
    seen = play(toy_trace(model, [step]), toy_profile(), policy, capacity={"hbm": 80})

    assert seen.plans[0].fetch == [0]
    assert list(seen.plans[0].cpu) == [1, 2, 3]
    assert seen.column("cpu_assignments") == [3]
    assert seen.column("end_ns") == [10 + 3 * COMPUTE]
    assert seen.metrics["cpu_share"] == 3 / 4
