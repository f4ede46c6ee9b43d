"""A run from its inputs: what is derived, what is refused, and what the user is told."""

import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from moetier.sim import memory
from moetier.sim.hardware import Profile
from moetier.sim.run import Setting, count, set_up, simulate
from moetier.sim.testing import run, toy_header, toy_profile, toy_trace
from moetier.traces.columns import build
from moetier.traces.errors import InputError
from moetier.traces.io import ArrayTrace
from moetier.traces.schema import Provenance

MODEL = toy_header(layers=2, n_experts=4, top_k=2)
TRACE = toy_trace(MODEL, [[[0, 1], [2, 3]]] * 3, prefill=[[[0, 1], [2, 3]]] * 4)
EXTENT = memory.extent_of(TRACE)


def stage(profile: Profile | None = None, policy: Any = "on-demand", **more: Any) -> Any:
    return set_up(MODEL, Setting(profile or toy_profile(), policy, **more), EXTENT)


def refused(profile: Profile | None = None, policy: Any = "on-demand", **more: Any) -> str:
    with pytest.raises(InputError) as caught:
        stage(profile, policy, **more)
    return str(caught.value)


# -- how far a source goes


def test_the_extent_of_a_trace() -> None:
    assert memory.Extent(context=7, steps=4, prefill_tokens=4, decode_tokens=3) == EXTENT


def test_the_extent_does_not_depend_on_chunks() -> None:
    """Two requests in lockstep: at the last step 9 + 9 entries are alive."""
    model = toy_header(layers=2, n_experts=4)
    whole = toy_trace(model, [[[[0], [1]], [[1], [2]]]] * 9)
    rows = next(iter(whole.columns()))
    for cut in (1, 2, 3, 5, 17):
        chunks = [rows.take(slice(0, cut)), rows.take(slice(cut, None))]
        extent = memory.extent_of(ArrayTrace(model, chunks))

        assert extent == memory.Extent(
            context=18, steps=9, prefill_tokens=0, decode_tokens=18, requests=2
        )


# -- what fits


def test_a_share_is_of_all_expert_bytes() -> None:
    assert stage(capacity={"hbm": Fraction(1, 4)}).capacities == [80]
    assert stage(capacity={"hbm": Fraction(1)}).capacities == [320]
    assert stage(capacity={"hbm": Fraction(3, 7)}).capacities == [137]


def test_by_default_a_cache_takes_what_is_left_and_no_more_than_there_is() -> None:
    assert stage().capacities == [320]
    small = toy_profile(hbm={"capacity": "150 B"})
    assert stage(small).capacities == [130]  # beside 2 x 10 bytes of dense weights
    assert stage(toy_profile(three={}), capacity={"hbm": 80}).capacities == [80, 320]


@pytest.mark.parametrize(("capacity", "fits"), [(80, True), (79, False)])
def test_a_cache_must_hold_what_a_token_needs_in_a_layer(capacity: int, fits: bool) -> None:
    if fits:
        assert stage(capacity={"hbm": capacity}).capacities == [80]
        return
    message = refused(capacity={"hbm": capacity})

    assert message.startswith("capacity.hbm: 79 B cannot hold the 2 experts that one token needs")
    assert message.endswith("give at least 80 B, or `eviction: double-buffer`")


def test_buffers_ignore_the_capacity() -> None:
    assert stage(policy="on-demand-uncached", capacity={"hbm": 1}).capacities == [1]


@pytest.mark.parametrize(("size", "fits"), [(100, True), (99, False)])
def test_a_budget_must_fit_beside_the_dense_part(size: int, fits: bool) -> None:
    profile = toy_profile(hbm={"capacity": f"{size} B"})
    if fits:
        assert stage(profile, capacity={"hbm": 80}).capacities == [80]
    else:
        assert "80 B of experts do not fit in 'hbm': 79 B of 99 B are left beside" in refused(
            profile, capacity={"hbm": 80}
        )


def test_the_dense_part_must_fit() -> None:
    message = refused(toy_profile(hbm={"capacity": "19 B"}))

    assert "tier 'hbm' has 19 B, less than what must be there beside the experts" in message
    assert "dense weights 20 B, KV cache 0 B" in message


@pytest.mark.parametrize(("size", "fits"), [(320, True), (319, False)])
def test_the_last_tier_must_hold_every_expert(size: int, fits: bool) -> None:
    profile = toy_profile(dram={"capacity": f"{size} B"})
    if fits:
        stage(profile)
    else:
        assert (
            "the experts take 320 B, but tier 'dram', which must hold all of them, has 319 B"
            in (refused(profile))
        )


def test_only_cached_tiers_have_a_budget() -> None:
    assert refused(capacity={"dram": 80}) == ("capacity: 'dram' is not a cached tier; use hbm")


# -- tiers


def test_tiers_may_be_left_out_from_below() -> None:
    assert stage(toy_profile(three={})).hierarchy.names == ("hbm", "dram", "nvme")
    assert stage(toy_profile(three={}), tiers=["hbm", "dram"]).hierarchy.names == ("hbm", "dram")


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        (["hbm", "disk"], r"tiers: 'toy' has no tier 'disk'; use \['hbm', 'dram', 'nvme'\]"),
        (["hbm"], "must be two or more, and begin with 'hbm', from which the processor computes"),
        (["dram", "nvme"], "begin with 'hbm'"),
        (["hbm", "nvme"], "'toy' has no link nvme -> hbm"),
    ],
)
def test_tiers_must_be_a_chain(tiers: list[str], message: str) -> None:
    assert re.search(message, refused(toy_profile(three={}), tiers=tiers))


def test_exclusive_tiers_need_two_caches_and_a_way_down() -> None:
    assert "exclusive tiers need two caches" in refused(exclusive=True)
    assert "no link hbm -> dram" in refused(toy_profile(three={}), exclusive=True)
    hierarchy = stage(toy_profile(three={}, down={}), exclusive=True).hierarchy
    assert hierarchy.exclusive
    assert hierarchy.cached == ("hbm", "dram")


def test_computing_below_needs_a_processor_there() -> None:
    profile = toy_profile()
    alone = profile.model_copy(update={"compute": {"gpu": profile.compute["gpu"]}})

    assert refused(alone, "fiddler").startswith("policy.miss: nothing computes from tier 'dram'")


# -- formats


def test_bytes_come_from_the_trace_or_from_the_geometry() -> None:
    sized = toy_header(n_experts=2, hidden=8, moe_intermediate=4, heads=1, kv_heads=1, head_dim=8)

    assert set_up(sized, Setting(toy_profile()), EXTENT).layout.nbytes == [40, 40]
    assert set_up(sized, Setting(toy_profile(), weights="int8"), EXTENT).layout.nbytes == [96, 96]


def test_uniform_precision_changes_the_bytes_and_the_output() -> None:
    sized = toy_header(200, n_experts=2, hidden=8, moe_intermediate=4)
    found = set_up(
        sized, Setting(toy_profile(), {"precision": {"kind": "uniform", "bits": 4}}), EXTENT
    )

    # 96 weights at 4 + (16 + 4) / 32 bits
    assert found.layout.nbytes == [56, 56]
    assert found.policy.alters_output


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ({"bits": 0}, "bits is 0; use 1 to 16"),
        ({"bits": 17}, "bits is 17; use 1 to 16"),
        ({"bits": 4, "group": 0}, "group is 0; use at least 1"),
        ({"bits": 16}, "codes of 16 bits take 192 bytes, more than the 191 of the stored format"),
    ],
)
def test_uniform_precision_refuses_what_is_no_gain(precision: dict[str, int], message: str) -> None:
    sized = toy_header(191, n_experts=2, hidden=8, moe_intermediate=4)
    policy = {"precision": {"kind": "uniform"} | precision}
    with pytest.raises(InputError, match=message):
        set_up(sized, Setting(toy_profile(), policy), EXTENT)


# -- popularity


def test_counts_of_a_profile_trace_decide_what_static_keeps() -> None:
    model = toy_header(n_experts=4)
    profile_trace = toy_trace(model, [[[e]] for e in (3, 3, 1, 1, 1, 2)])
    found = run(
        toy_trace(model, [[[e]] for e in (0, 1, 2, 3)]),
        toy_profile(),
        {"eviction": "static", "warmup": "static"},
        capacity={"hbm": 80},
        popularity=profile_trace,
    )

    assert count(profile_trace, found.result.stage.layout) == [0, 3, 1, 2]
    assert found.column("misses") == [1, 0, 1, 0]
    assert [list(plan.evicted) for plan in found.plans] == [[0], [], [2], []]  # passing through


def test_without_a_profile_static_goes_by_expert_index() -> None:
    trace = toy_trace(toy_header(layers=2, n_experts=4), [[[e], [e]] for e in (0, 1, 2, 3)])
    found = run(trace, toy_profile(), {"eviction": "static"}, capacity={"hbm": 160})

    assert found.column("misses") == [1] * 8
    again = run(
        trace, toy_profile(), {"eviction": "static", "warmup": "static"}, capacity={"hbm": 160}
    )
    assert again.column("misses") == [0, 0, 0, 0, 1, 1, 1, 1]


def test_padding_and_invalid_rows_are_not_counted() -> None:
    model = toy_header(n_experts=4, top_k=2)
    rows = build(
        model,
        request=0, phase=1, step=[0, 1, 2], position=[0, 1, 2], moe_layer=0,
        experts=[[0, -1], [0, 1], [2, 3]], valid=[True, True, False],
    )  # fmt: skip
    found = set_up(model, Setting(toy_profile()), EXTENT)

    assert count(ArrayTrace(model, [rows]), found.layout) == [2, 1, 0, 0]


def test_a_profile_of_another_model_is_refused() -> None:
    other = toy_trace(toy_header(n_experts=3), [[[0]]])
    with pytest.raises(
        InputError, match=r"the profile has 1 MoE layers of 3 experts, the run 2 of 4"
    ):
        run(TRACE, toy_profile(), popularity=other)


# -- what is heard, and what is said


def test_steps_are_announced_once_each() -> None:
    heard: list[int] = []
    simulate(TRACE, Setting(toy_profile()), on_step=heard.append)

    assert heard == [0, 1, 2, 3]
    silent = simulate(TRACE, Setting(toy_profile()))
    assert simulate(TRACE, Setting(toy_profile()), on_step=heard.append).metrics == silent.metrics


def test_a_cliff_is_said_with_its_size() -> None:
    """A token needs 160 bytes over both layers.

    When a layer comes round, 80 bytes of the other are younger than its own; below 120 none of its
    experts is left, and from 160 on all are.
    """
    below, above, whole = (run(TRACE, toy_profile(), capacity={"hbm": n}) for n in (119, 120, 160))

    assert below.metrics["hit_rate_decode"] == 0
    assert any("LRU cliff: one token's experts take 160 B" in w for w in below.result.warnings)
    assert above.metrics["hit_rate_decode"] == 1 / 2
    assert whole.metrics["hit_rate_decode"] == 1
    assert above.result.warnings == whole.result.warnings == []


def test_a_policy_that_does_nothing_is_said_to() -> None:
    inert = run(TRACE, toy_profile(), {"prefetch": "previous-token", "miss": "skip"})

    assert inert.result.warnings == [
        "policy inert: the prefetcher never issued anything",
        "policy inert: nothing was ever skipped or done without",
    ]


def test_assumptions_are_named() -> None:
    said = run(TRACE, toy_profile(), {"miss": "skip", "warmup": "static"}).result.known_limitations

    for part in ("modelled, not measured", "roofline", "sizes are unknown", "routing is synthetic"):
        assert sum(part in line for line in said) == 1
    assert any("replayed lossy policy" in line for line in said)
    assert any("warm-up" in line for line in said)


def test_unverified_numbers_and_unknown_columns_are_named() -> None:
    profile = toy_profile(hbm={"source": "unverified"}, gpu={"source": "Unverified for this model"})
    geometry = MODEL.geometry.model_copy(update={"unverified": ["hidden"]})
    header = MODEL.model_copy(
        update={
            "unknown": ["weights"],
            "geometry": geometry,
            "provenance": Provenance(kind="imported"),
        }
    )
    trace = ArrayTrace(header, list(TRACE.columns()))
    said = run(trace, profile).result.known_limitations

    assert "unverified numbers in 'toy': tiers.hbm, compute.gpu" in said
    assert "the trace does not say: weights" in said
    assert "unverified in the geometry of 'toy': hidden" in said
    assert not any("synthetic" in line for line in said)


def test_random_warm_up_fills_the_cache() -> None:
    found = run(TRACE, toy_profile(), {"warmup": "random"}, capacity={"hbm": 200}, seed=7)

    assert found.column("warmup_bytes")[2] > 0
    assert np.all(found.records["resident_bytes"] <= 200)


def test_a_batch_that_starves_is_told_with_what_a_step_takes() -> None:
    header = toy_header(40, layers=2, n_experts=4)
    steps = [[[[0], [0]], [[1], [1]]], [[[2], [2]], [[3], [3]]]] * 3
    source = toy_trace(header, steps)

    found = run(source, toy_profile(), capacity={"hbm": 120})

    assert found.metrics["hit_rate_decode"] == 0
    assert any("one step's experts take 160 B" in text for text in found.result.warnings)


def test_a_static_set_without_a_profile_is_told() -> None:
    header = toy_header(40, n_experts=3)
    source = toy_trace(header, [[[0]], [[1]], [[2]]])

    found = run(source, toy_profile(), {"eviction": "static"}, capacity={"hbm": 80})

    assert any("no profile" in text for text in found.result.warnings)


def test_a_batch_that_does_not_fit_beside_the_rest_is_warned_of() -> None:
    trace = toy_trace(toy_header(40, dense_bytes=10), [[[0]], [[1]], [[2]]])

    def overflows(size: str) -> list[str]:
        found = run(trace, toy_profile(hbm={"capacity": size}), capacity={"hbm": 80})
        return [text for text in found.result.warnings if "overflows" in text]

    assert overflows("130 B") == []
    assert overflows("129 B") == [
        "'hbm' overflows: a batch's experts beside the cached ones take 120 B, 1 B more than fit "
        "beside dense weights 10 B, KV cache 0 B; set a smaller capacity"
    ]
