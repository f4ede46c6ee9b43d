"""Tests of what is left to win, against closed forms on a machine of a byte per nanosecond."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from moetier.experiments.config import RunConfig, check_run
from moetier.experiments.headroom import headroom, rows_of
from moetier.experiments.runs import run
from moetier.sim.testing import toy_header, toy_profile, toy_trace
from moetier.traces.errors import InputError
from moetier.traces.io import write_trace

NS = 1e-6  # in ms
DENSE, EXPERT = 10, 40  # bytes, and so ns
SECOND = {"bandwidth": "500 MB/s"}

Toy = Callable[..., RunConfig]


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    """Return a function that makes a run: three experts of one layer in turn, twelve steps."""

    def make(
        capacity: int, policy: Any = "on-demand", bandwidth: str = "1 GB/s", **more: Any
    ) -> RunConfig:
        header = toy_header(more.pop("sizes", EXPERT), n_experts=3, layers=more.pop("layers", 1))
        token = more.pop("token", lambda step: [[step % 3]])
        trace = toy_trace(header, [token(step) for step in range(12)])
        write_trace(trace, tmp_path / "toy.parquet")
        profile = toy_profile(bandwidth=bandwidth, three=more.pop("three", None))
        machine = tmp_path / "toy.yaml"
        machine.write_text(yaml.safe_dump(profile.model_dump(mode="json"), sort_keys=False))
        second = more.pop("dram", None)
        keys = {
            "trace": str(tmp_path / "toy.parquet"),
            "hardware": str(machine),
            "capacity": {"hbm": f"{capacity} B"} | ({"dram": second} if second else {}),
            "policy": policy,
        }
        return check_run(keys | more, "toy")

    return make


def test_nothing_is_left_where_everything_is_there_from_the_start(toy: Toy) -> None:
    found = headroom(toy(3 * EXPERT, {"warmup": "static"}))

    assert found["own"]["tpot_ms"] == pytest.approx((DENSE + EXPERT) * NS)
    for bound in ("belady", "perfect_prefetch", "roofline"):
        assert found[bound]["tpot_gain"] == 0
    assert found["belady"]["miss_rate_gap"] == 0
    assert found["roofline"]["link_ms"] == 0
    assert found["roofline"]["bound"] == "compute"


def test_only_what_nobody_can_keep_is_left_where_everything_fits(toy: Toy) -> None:
    found = headroom(toy(3 * EXPERT))

    first_uses = 2 * EXPERT / 11  # of eleven steps that count, two meet an expert never seen
    assert found["own"]["tpot_ms"] == pytest.approx((DENSE + EXPERT + first_uses) * NS)
    assert found["belady"]["tpot_gain"] == found["belady"]["miss_rate_gap"] == 0
    assert found["perfect_prefetch"]["tpot_ms"] == pytest.approx((DENSE + EXPERT) * NS)


def test_the_cliff_of_lru(toy: Toy) -> None:
    """Three experts in turn through room for two: LRU never hits, Belady every second time."""
    found = headroom(toy(2 * EXPERT))

    missing, resident = DENSE + 2 * EXPERT, DENSE + EXPERT
    assert found["own"]["miss_rate"] == found["own"]["byte_miss_rate"] == 1
    assert found["own"]["tpot_ms"] == pytest.approx(missing * NS)
    assert found["belady"]["miss_rate"] == pytest.approx(7 / 12)  # at 0, 1, 2, 4, 6, 8, 10
    assert found["belady"]["miss_rate_gap"] == pytest.approx(5 / 12)
    assert found["belady"]["byte_miss_rate_gap"] == pytest.approx(5 / 12)
    belady = (6 * missing + 5 * resident) / 11  # the first step does not count
    assert found["belady"]["tpot_ms"] == pytest.approx(belady * NS)
    assert found["belady"]["tpot_gain"] == pytest.approx(1 - belady / missing)
    assert found["belady"]["optimal"] is True


def test_perfect_prefetch_hides_a_copy_as_long_as_an_expert(toy: Toy) -> None:
    every = headroom(toy(2 * EXPERT))

    assert rows_of(every)[2]["about"] == "1 layer ahead"
    found = every["perfect_prefetch"]
    assert found["tpot_ms"] == pytest.approx((DENSE + EXPERT) * NS)
    assert found["depth"] == 1
    assert found["tpot_gain"] == pytest.approx(1 - (DENSE + EXPERT) / (DENSE + 2 * EXPERT))


@pytest.mark.parametrize(
    ("bandwidth", "copy", "bound"), [("1 GB/s", EXPERT, "compute"), ("100 MB/s", 400, "link")]
)
def test_the_roofline_is_compute_or_the_fewest_bytes_over_the_link(
    bandwidth: str, copy: int, bound: str, toy: Toy
) -> None:
    found = headroom(toy(2 * EXPERT, bandwidth=bandwidth))

    compute, link = DENSE + EXPERT, 6 * copy / 11  # the first step is no part of TPOT
    roofline = found["roofline"]
    assert roofline["compute_ms"] == pytest.approx(compute * NS)
    assert roofline["link_ms"] == pytest.approx(link * NS)
    assert roofline["tpot_ms"] == pytest.approx(max(compute, link) * NS)
    assert roofline["bound"] == bound
    own = found["own"]["tpot_ms"]
    assert own == pytest.approx((compute + copy) * NS)
    assert roofline["tpot_gain"] == pytest.approx(1 - max(compute, link) / (compute + copy))


def test_a_cold_first_step_does_not_lift_the_roofline_above_the_run(toy: Toy) -> None:
    found = headroom(toy(3 * EXPERT, bandwidth="100 MB/s", token=lambda step: [[0]]))

    assert found["roofline"]["link_ms"] == 0
    assert found["roofline"]["tpot_ms"] <= found["own"]["tpot_ms"]


def test_steps_that_are_not_measured_do_not_count(toy: Toy) -> None:
    found = headroom(toy(2 * EXPERT, measure={"warmup_steps": 4}))

    assert found["belady"]["miss_rate"] == pytest.approx(4 / 8)
    assert found["roofline"]["link_ms"] == pytest.approx(EXPERT / 2 * NS)


def test_the_lowest_link_counts_where_it_is_the_slowest(toy: Toy) -> None:
    """The second tier keeps nothing that the first does not: every miss goes all the way down."""
    config = toy(2 * EXPERT, three=SECOND, dram="40 B")

    found = headroom(config)["roofline"]

    assert found["link_ms"] == pytest.approx(6 * 2 * EXPERT / 11 * NS)
    assert found["bound"] == "compute"


def test_slices_of_several_sizes_make_belady_a_bound_in_name_only(toy: Toy) -> None:
    config = toy(120, sizes=[40, 60], layers=2, token=lambda step: [[step % 3], [step % 3]])

    found = headroom(config)

    assert found["belady"]["optimal"] is False
    assert "differ in size" in rows_of(found)[1]["about"]


def test_belady_has_nothing_to_win_against_itself(toy: Toy) -> None:
    found = headroom(toy(2 * EXPERT, "belady"))

    assert found["belady"]["tpot_gain"] == found["belady"]["miss_rate_gap"] == 0


def test_belady_is_on_demand(toy: Toy) -> None:
    early = headroom(toy(2 * EXPERT, {"prefetch": "oracle"}))
    late = headroom(toy(2 * EXPERT))

    assert early["belady"]["tpot_ms"] == late["belady"]["tpot_ms"]
    assert early["roofline"]["link_ms"] == late["roofline"]["link_ms"]


def test_belady_is_given_to_the_fastest_tier_alone(toy: Toy) -> None:
    policy = {"eviction": {"hbm": "lru", "dram": "fifo"}}
    config = toy(80, policy, three=SECOND, dram="80 B")
    wanted = config.model_copy(update={"policy": {"eviction": {"hbm": "belady", "dram": "fifo"}}})

    found = headroom(config)["belady"]

    assert found["tpot_ms"] == run(wanted)["tpot_ms"]


def test_what_follows_the_cache_has_no_oracle() -> None:
    keys = {
        "trace": "traces/samples/moe-tiny.parquet",
        "hardware": "phone-ufs4",
        "capacity": {"dram": "25 %"},
        "policy": "cache-prior",
    }
    try:
        config = check_run(keys, "k")
    except InputError:
        pytest.skip("the sample trace is not there")

    found = headroom(config)

    for bound in ("belady", "perfect_prefetch"):
        assert found[bound]["tpot_ms"] is None
        assert "no oracle can foresee" in found[bound]["reason"]
    assert found["roofline"]["link_ms"] is None
    assert found["roofline"]["bound"] == "compute"
    assert 0 < found["roofline"]["tpot_gain"] < 1
    assert "no oracle can foresee" in rows_of(found)[1]["about"]


def test_a_live_model_has_no_future() -> None:
    config = RunConfig(live="moe-tiny", hardware="phone-ufs4")

    with pytest.raises(InputError, match=r"knowing the future.*moetier capture"):
        headroom(config)


def test_a_run_without_decode_has_nothing_to_tell(make_run: Callable[..., RunConfig]) -> None:
    found = headroom(make_run(synthetic__tokens=0))

    assert found["own"]["tpot_ms"] is None
    assert found["belady"]["tpot_gain"] is None
    assert found["roofline"] == {
        "tpot_ms": None, "compute_ms": None, "link_ms": None, "bound": None, "tpot_gain": None,
    }  # fmt: skip
    assert [row["left_to_win"] for row in rows_of(found)] == [None] * 4


def test_errors_name_the_config(make_run: Callable[..., RunConfig]) -> None:
    with pytest.raises(InputError, match=r"^here: capacity\.dram: "):
        headroom(make_run(capacity__dram="0.1 %"), where="here")
