"""Metrics and energy, worked out by hand from small runs.

An expert has 40 bytes and takes 40 ns to copy and 40 ns to compute; the dense part takes 10 ns.
"""

from typing import Any

import numpy as np
import pytest

from moetier.sim.metrics import Metrics, summarise
from moetier.sim.records import COMMON, DERIVED, ENERGY, RARE
from moetier.sim.testing import Run, run, toy_header, toy_profile, toy_trace

PERFECT = {"prefetch": "oracle"}


def tokens(experts: list[int], prompt: list[int] | None = None, **model: Any) -> Any:
    """Return a trace over one layer: one expert per token."""
    prefill = [[[e]] for e in prompt or []]
    return toy_trace(toy_header(n_experts=4, **model), [[[e]] for e in experts], prefill=prefill)


def test_tpot_leaves_out_the_first_step() -> None:
    """Steps of 90, 50, 90 and 50 ns."""
    seen = run(tokens([0, 0, 1, 1]), toy_profile(), capacity={"hbm": 40})

    assert seen.metrics["tpot_ms"] == pytest.approx((50 + 90 + 50) / 3 / 1e6)
    assert seen.metrics["time_breakdown_ms"] == pytest.approx(
        {"dense": 10 / 1e6, "wait": 40 / 3 / 1e6, "expert": 40 / 1e6}
    )
    assert seen.metrics["decode_steps"] == seen.metrics["tokens"] == 4
    assert seen.metrics["tokens_per_s"] == pytest.approx(4e9 / 280)


def test_warm_up_steps_leave_out_as_many_and_no_more() -> None:
    seen = run(tokens([0, 1, 0, 0]), toy_profile(), capacity={"hbm": 40}, warmup_steps=2)

    assert seen.metrics["tpot_ms"] == pytest.approx((90 + 50) / 2 / 1e6)
    assert seen.metrics["miss_rate"] == 1 / 2
    assert seen.metrics["tokens"] == 2


def test_one_step_has_no_tpot_and_no_prefill_no_ttft() -> None:
    metrics = run(tokens([0]), toy_profile(), capacity={"hbm": 40}).metrics

    assert metrics["tpot_ms"] is None
    assert metrics["tpot_p50_ms"] is None
    assert metrics["ttft_ms"] is None
    assert metrics["miss_rate_prefill"] is None
    assert metrics["energy_mj_prefill"] is None
    assert metrics["prefetch_precision"] is None
    assert metrics["accuracy"] is None
    assert metrics["lower_hit_rate"] is None


def test_ttft_is_the_time_of_prefill() -> None:
    seen = run(tokens([0], prompt=[0, 1]), toy_profile(), capacity={"hbm": 80})

    assert seen.metrics["ttft_ms"] == pytest.approx((10 + 80 + 80) / 1e6)
    assert seen.metrics["hit_rate_cumulative"] == 1 / 3
    assert seen.metrics["hit_rate_decode"] == 1
    assert seen.metrics["compulsory_misses"] == 2
    assert seen.metrics["compulsory_miss_rate"] == 0


def test_percentiles_are_of_steps() -> None:
    """19 steps of 50 ns and one of 90: the 95th percentile lies between the last two."""
    experts = [0] * 11 + [1] * 10
    seen = run(tokens(experts), toy_profile(), capacity={"hbm": 40})
    durations = sorted([50] * 19 + [90])

    for q in (50, 95, 99):
        expected = np.quantile(durations, q / 100) / 1e6
        assert seen.metrics[f"tpot_p{q}_ms"] == pytest.approx(expected)
    assert seen.metrics["tpot_p95_ms"] == pytest.approx(52 / 1e6)


def test_stall_and_copy_share_of_demand_misses() -> None:
    """Two of four steps wait 40 of 90 ns."""
    seen = run(tokens([0, 0, 1, 1]), toy_profile(), capacity={"hbm": 40})

    assert seen.metrics["stall_share"] == seen.metrics["copy_share"] == 80 / 280
    assert seen.metrics["bytes_per_token"] == 20
    assert seen.metrics["bytes_read_total"] == seen.metrics["demand_bytes"] == 80


def test_a_late_prefetch_stalls_without_a_demand_copy() -> None:
    """A copy of 60 ns takes 10 longer than dense part and experts: a stall, and no demand copy."""
    slow = toy_profile(latency="20 ns")
    seen = run(tokens([0, 1, 2, 3]), slow, PERFECT, capacity={"hbm": 80})

    assert seen.column("wait_ns") == [60, 10, 10, 10]
    assert seen.column("copy_ns") == [60, 0, 0, 0]
    assert seen.column("late_hits") == [0, 1, 1, 1]
    assert seen.metrics["stall_share"] == 90 / (4 * 50 + 90)
    assert seen.metrics["copy_share"] == 60 / (4 * 50 + 90)
    assert seen.metrics["late_hit_rate"] == 3 / 4
    assert seen.metrics["miss_rate"] == 1 / 4  # a late hit is a hit


def test_prefetch_counts_of_an_oracle() -> None:
    """All but the first token's expert is brought early, and used; none is late."""
    metrics = run(tokens([0, 1, 2, 3]), toy_profile(), PERFECT, capacity={"hbm": 80}).metrics

    assert metrics["prefetch_issued"] == 3
    assert metrics["prefetch_precision"] == 1
    assert metrics["prefetch_coverage"] == 3 / 4
    assert metrics["ready_recall"] == 3 / 4
    assert metrics["prefetch_bytes"] == 120
    assert metrics["prefetch_wasted_bytes"] == 0


def test_prefetch_counts_of_a_wrong_guess() -> None:
    """Three layers, room for two: what the last token used is brought, and one is of no use.

    Layer 1 changes from expert 0 to 1: the guess (0) is never used and leaves for 1, once landed.
    """
    model = toy_header(layers=3, n_experts=2)
    trace = toy_trace(model, [[[0], [0], [0]], [[0], [1], [0]], [[0], [1], [0]]])
    seen = run(trace, toy_profile(), "previous-token", capacity={"hbm": 80})
    issued, used = seen.column("prefetch_issued"), seen.column("prefetch_used")
    wasted = seen.column("prefetch_wasted_bytes")

    assert sum(issued) == seen.metrics["prefetch_issued"]
    assert seen.metrics["prefetch_precision"] == sum(used) / sum(issued)
    assert seen.metrics["prefetch_coverage"] == sum(used) / (sum(used) + seen.metrics["misses"])
    assert 40 in wasted
    assert sum(wasted) == seen.metrics["prefetch_wasted_bytes"]
    # every guess is used, wasted, dropped with the plan, or still resident
    assert sum(issued) - sum(used) - sum(wasted) // 40 in (0, 1)


def test_warm_up_bytes_are_counted_apart() -> None:
    seen = run(tokens([0, 1]), toy_profile(), {"warmup": "static"}, capacity={"hbm": 80})

    assert seen.column("misses") == [0, 0]
    assert seen.metrics["warmup_bytes"] == 80
    assert seen.metrics["bytes_read_total"] == 0
    assert any("warm-up" in line for line in seen.result.known_limitations)


# -- energy. 1 pJ/bit is 8 pJ per byte; one watt for one nanosecond is 1000 pJ.


def metered(**more: Any) -> Any:
    return toy_profile(
        hbm={"read_energy": "1 pJ/bit", "write_energy": "2 pJ/bit"},
        dram={"read_energy": "3 pJ/bit", "write_energy": "5 pJ/bit"},
        gpu={"energy": "7 pJ/op", "peak": "1000 TOP/s"},
        cpu={"energy": "11 pJ/op", "peak": "1000 TOP/s"},
        static_power="1 W",
        **more,
    )


def picojoules(seen: Run) -> dict[str, list[int]]:
    return {name.removeprefix("energy_").removesuffix("_pj"): seen.column(name) for name in ENERGY}


def test_energy_of_one_fetch_by_component() -> None:
    """The second step hits, so the first costs more by exactly one fetch."""
    seen = run(tokens([0, 0]), metered(), capacity={"hbm": 40})
    miss, hit = ({name: pair[i] for name, pair in picojoules(seen).items()} for i in (0, 1))

    assert hit == {
        "compute": 0,  # the model's sizes are unknown
        "fast_tier": (10 + 40) * 8,  # dense and expert bytes read
        "lower_tiers": 0,
        "links": 0,
        "static": 50 * 1000,  # 1 W for 50 ns
    }
    assert {name: miss[name] - hit[name] for name in hit} == {
        "compute": 0,
        "fast_tier": 40 * 2 * 8,  # written
        "lower_tiers": 40 * 3 * 8,  # read
        "links": 0,
        "static": 40 * 1000,
    }
    assert seen.metrics["energy_mj_per_token"] == pytest.approx(
        sum([*miss.values(), *hit.values()]) / 2 / 1e9
    )


def test_energy_of_operations_on_both_processors() -> None:
    """An expert is 48 operations; token 1 computes one above, one below."""
    model = toy_header(n_experts=2, top_k=2, hidden=8, moe_intermediate=1, heads=1, head_dim=8)
    model = model.model_copy(update={"geometry": model.geometry.model_copy(update={"kv_heads": 1})})
    trace = toy_trace(model, [[[0, 1]]], prefill=[[[0]]])
    seen = run(trace, metered(), {"miss": {"kind": "cpu"}}, capacity={"hbm": 80})
    below = run(trace, metered(), {"warmup": "static"}, capacity={"hbm": 80})

    assert seen.column("cpu_assignments") == [1, 2]
    # the same operations, priced at 11 instead of 7 pJ
    difference = np.subtract(seen.column("energy_compute_pj"), below.column("energy_compute_pj"))
    assert difference.tolist() == [48 * 4, 2 * 48 * 4]
    assert seen.column("energy_lower_tiers_pj") == [40 * 3 * 8, 80 * 3 * 8]
    assert below.column("energy_lower_tiers_pj") == [0, 0]


def test_energy_of_three_tiers_and_of_a_demotion() -> None:
    """From below: read there, written and read on the way, both links paid; then copied down."""
    profile = metered(three={"energy": "13 pJ/bit"}, down={"energy": "17 pJ/bit"})
    seen = run(tokens([0, 1]), profile, capacity={"hbm": 40, "dram": 40}, exclusive=True)

    assert seen.column("lower_bytes") == [40, 40]
    assert seen.column("demoted_bytes") == [0, 40]
    assert seen.column("energy_lower_tiers_pj") == [40 * (3 + 5) * 8, 40 * (3 + 5 + 5) * 8]
    assert seen.column("energy_links_pj") == [40 * 13 * 8, 40 * (13 + 17) * 8]
    fast = (10 + 40) * 8 + 40 * 2 * 8
    assert seen.column("energy_fast_tier_pj") == [fast, fast + 40 * 8]


def test_a_prefetch_costs_what_a_fetch_costs() -> None:
    """The oracle moves the same bytes at other times: all but static energy is the same in sum."""
    on_demand = run(tokens([0, 1, 2, 3]), metered(), capacity={"hbm": 80})
    early = run(tokens([0, 1, 2, 3]), metered(), PERFECT, capacity={"hbm": 80})

    for name in ("compute", "fast_tier", "lower_tiers", "links"):
        assert sum(picojoules(early)[name]) == sum(picojoules(on_demand)[name])
    assert sum(picojoules(early)["static"]) < sum(picojoules(on_demand)["static"])


def test_energy_is_rounded_up_once() -> None:
    """9 bytes read at 1 fJ each are 1 pJ, not 9."""
    profile = toy_profile(hbm={"read_energy": "1 fJ/byte"})
    seen = run(tokens([0], expert_bytes=8, dense_bytes=1), profile, capacity={"hbm": 8})

    assert seen.column("energy_fast_tier_pj") == [1]


# -- metrics are a function of the records alone


def test_blocks_may_be_cut_anywhere() -> None:
    trace = toy_trace(toy_header(layers=3, n_experts=4), [[[0], [1], [2]], [[3], [1], [0]]] * 3)
    seen = run(trace, toy_profile(), "previous-token", capacity={"hbm": 160})
    whole = summarise([seen.records])

    for cut in (1, 4, 5, 17):
        parts = [{n: v[:cut] for n, v in seen.records.items()}]
        parts += [{n: v[cut:] for n, v in seen.records.items()}]
        assert summarise(parts) == whole
    assert whole.items() <= seen.metrics.items()


def test_no_records_give_no_values() -> None:
    empty: dict[str, Any] = {n: np.zeros(0, np.int64) for n in (*COMMON, *DERIVED, *RARE, *ENERGY)}
    metrics = summarise([empty])

    assert metrics == Metrics().summary()
    assert metrics["tpot_ms"] is None
    assert metrics["tokens"] == 0


def test_a_machine_without_coefficients_has_no_energy_rather_than_none_used() -> None:
    trace = toy_trace(toy_header(40), [[[0]], [[1]]])

    metrics = run(trace, toy_profile(), capacity={"hbm": 80}).metrics

    assert metrics["energy_mj_per_token"] is None
    assert set(metrics["energy_breakdown"].values()) == {None}
