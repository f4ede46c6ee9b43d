"""A missing expert is three transfers, gates first, and a token adds up its layers."""

from __future__ import annotations

import pytest

from moetier.sim.hardware import Profile
from moetier.sim.machine.base import Span
from moetier.sim.plan import LayerPlan
from moetier.traces.schema import Header
from moetier.validate.phone.model import batch_of, costs_of, hierarchy_of, layout_of, read_link
from moetier.validate.phone.reads import PAGE, ReadMachine, in_reads

THIRD = (1 << 20) + PAGE


def machine_of(
    header: Header, profile: Profile, overlap: bool = True, spans: list[Span] | None = None
) -> ReadMachine:
    hierarchy = hierarchy_of(profile, overlap)
    watch = spans.append if spans is not None else None
    return ReadMachine(hierarchy, costs_of(header, hierarchy), layout_of(header), watch)


def plan(header: Header, layer: int, misses: int, step: int = 0) -> LayerPlan:
    needed = [layout_of(header).slice_id(layer, expert) for expert in range(2)]
    return LayerPlan(batch_of(step, layer, 8, 2), needed, needed[:misses])


def test_an_expert_is_in_equal_parts_each_a_page_longer(header: Header) -> None:
    parts = in_reads(layout_of(header), 3)

    assert set(parts.nbytes) == {THIRD}
    assert (parts.n_parts, parts.n_experts, parts.n_layers) == (3, 4, 2)


def test_parts_are_rounded_up(header: Header) -> None:
    assert set(in_reads(layout_of(header), 2).nbytes) == {3 * (1 << 19) + PAGE}
    assert set(in_reads(layout_of(header), 7).nbytes) == {-(-3 * (1 << 20) // 7) + PAGE}


def test_one_missing_expert_keeps_three_lanes_busy(header: Header, phone: Profile) -> None:
    machine = machine_of(header, phone)
    each = read_link(phone).copy_ns(THIRD, 3)

    machine.execute(plan(header, 0, 1))

    token = machine.tokens[0]
    assert token.lanes == 3 * each
    assert token.copy == each
    assert token.nbytes == 3 * THIRD


def test_gates_are_read_before_ups(header: Header, phone: Profile) -> None:
    spans: list[Span] = []

    machine_of(header, phone, spans=spans).execute(plan(header, 0, 2))

    reads = [span for span in spans if span.lane.startswith("link ")]
    parts = [span.info["slice"] for span in sorted(reads, key=lambda s: (s.start, s.lane))]
    assert parts == [0, 3, 1, 4, 2, 5]  # slice = expert * 3 + matrix


def test_compute_of_a_resident_expert_hides_reads_only_with_overlap(
    header: Header, phone: Profile
) -> None:
    beside, after = machine_of(header, phone), machine_of(header, phone, overlap=False)
    beside.execute(plan(header, 0, 1))
    after.execute(plan(header, 0, 1))

    (early,), (late,) = beside.tokens, after.tokens
    assert early.copy == late.copy == late.wait
    assert early.wait < early.copy
    assert late.wall - early.wall == late.wait - early.wait > 0


def test_a_token_adds_up_its_layers(header: Header, phone: Profile) -> None:
    both, first = machine_of(header, phone), machine_of(header, phone)
    for layer, misses in ((0, 1), (1, 2)):
        both.execute(plan(header, layer, misses))
    both.execute(plan(header, 0, 0, step=1))
    first.execute(plan(header, 0, 1))

    assert len(both.tokens) == 2
    assert both.tokens[0].nbytes == 9 * THIRD
    assert both.tokens[0].wall + both.tokens[1].wall == both.now
    assert both.tokens[0].lanes > first.tokens[0].lanes
    assert both.tokens[1][1:] == (0, 0, 0, 0)


def test_prefetching_is_refused(header: Header, phone: Profile) -> None:
    early = plan(header, 0, 1)
    early.prefetch = [5]

    with pytest.raises(ValueError, match="on demand only"):
        machine_of(header, phone).execute(early)
