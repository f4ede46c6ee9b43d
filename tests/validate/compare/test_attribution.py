"""Tests that the causes of an error add up to it, and that each is what it is called."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetier.sim.machine.simulated import SimMachine
from moetier.sim.run import Setting, simulate
from moetier.sim.testing import toy_header, toy_profile, toy_trace
from moetier.validate.compare.attribution import PARTS, attribute, timed_rows
from moetier.validate.compare.observe import Case, Observed, observe

TRACE = toy_trace(toy_header(n_experts=4), [[[e]] for e in (0, 1, 2, 0, 3, 0, 1, 2)])
STEPS = 8


def seen(policy: Any = "on-demand", overlap: bool = False, **profile: Any) -> Observed:
    """Return a simulated run, in which the host program took no time."""

    def run(case: Case, around: Any, **observers: Any) -> Any:
        return simulate(case.source, case.setting, machine=around(SimMachine), **observers)

    setting = Setting(toy_profile(**profile), policy, {"hbm": 120}, overlap=overlap)
    found = observe(run, Case("x", {}, TRACE, setting))
    return replace(found, host_ns=np.zeros_like(found.host_ns))


def changed(one: Observed, name: str, by: Any) -> Observed:
    """Return *one* with *by* ns more in the column *name* of each row."""
    return replace(one, rows=one.rows | {name: one.rows[name] + np.asarray(by, np.int64)})


Extra = st.lists(st.integers(0, 10**9), min_size=STEPS, max_size=STEPS)


@given(Extra, Extra, Extra, Extra, st.lists(st.booleans(), min_size=STEPS, max_size=STEPS))
def test_the_parts_add_up_to_the_difference(
    dense: Any, wait: Any, experts: Any, host: Any, beside: Any
) -> None:
    one = seen()
    two = changed(changed(changed(one, "dense_ns", dense), "wait_ns", wait), "expert_ns", experts)
    two = replace(two, host_ns=np.minimum(host, dense), beside=np.array(beside))
    found = attribute(one, two)
    timed = timed_rows(two.rows)
    total = sum(np.array(x)[timed].sum() for x in (dense, wait, experts))

    assert found is not None
    assert tuple(found) == PARTS
    assert sum(found.values()) == pytest.approx(total / 1e6 / (STEPS - 1))


@pytest.mark.parametrize(
    ("column", "part"), [("wait_ns", "link"), ("dense_ns", "compute"), ("expert_ns", "compute")]
)
def test_each_time_has_its_cause(column: str, part: str) -> None:
    one = seen()
    found = attribute(one, changed(one, column, 3_000_000))

    assert found == pytest.approx(dict.fromkeys(PARTS, 0.0) | {part: 3.0})


def test_host_time_is_a_part_of_the_dense_time() -> None:
    one = seen()
    two = changed(one, "dense_ns", 2_000_000)
    found = attribute(one, replace(two, host_ns=two.host_ns + 2_000_000))

    assert found == pytest.approx(dict.fromkeys(PARTS, 0.0) | {"host": 2.0})


def test_host_time_is_what_exceeds_that_of_the_profile() -> None:
    one = seen(gpu={"host_time_per_layer": "1 ms"})
    found = attribute(
        one, changed(replace(one, host_ns=one.host_ns + 4_000_000), "dense_ns", 3_000_000)
    )

    assert found == pytest.approx(dict.fromkeys(PARTS, 0.0) | {"host": 3.0})


def test_without_a_quiet_batch_all_of_compute_is_contention() -> None:
    one = seen()
    two = replace(changed(one, "expert_ns", 1_000_000), beside=np.ones(STEPS, np.bool_))
    found = attribute(one, two)

    assert found == pytest.approx(dict.fromkeys(PARTS, 0.0) | {"contention": 1.0})


def test_with_overlap_experts_are_beside_their_own_copies() -> None:
    """Some batches fetch and some do not; only those that do err."""
    for overlap, part in ((True, "contention"), (False, "compute")):
        one = seen(overlap=overlap)
        fetching = one.rows["fetch_bytes"] > 0
        timed = timed_rows(one.rows)
        assert 0 < fetching[timed].sum() < timed.sum()
        found = attribute(one, changed(one, "expert_ns", 1_000_000 * fetching))

        assert found is not None
        expected = fetching[timed].sum() / timed.sum()
        assert found[part] == pytest.approx(expected)


def test_batches_that_order_prefetches_compute_their_experts_beside_them() -> None:
    one = seen({"prefetch": "oracle"})
    two = replace(one, beside=np.zeros(STEPS, np.bool_))
    ordered = two.rows["prefetch_issued"] > 0
    found = attribute(one, changed(two, "expert_ns", 1_000_000 * ordered))

    assert ordered[timed_rows(two.rows)].any()
    assert found is not None
    assert found["contention"] > 0
    assert found["compute"] == 0


def test_nothing_is_said_without_a_timed_step_or_of_other_rows() -> None:
    one = seen()
    fewer = replace(one, rows={name: column[:-1] for name, column in one.rows.items()})

    assert attribute(one, one, warmup_steps=STEPS) is None
    assert attribute(fewer, one) is None
