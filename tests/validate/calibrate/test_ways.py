"""Tests of the ways to compute an expert: which there are, and that caches hold none of them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np

from moetier.sim.policy.precision.bit_sliced import BitSliced
from moetier.sim.policy.precision.channels import Channels
from moetier.sim.policy.precision.hobbit import Hobbit
from moetier.sim.policy.precision.uniform import Uniform
from moetier.traces.batch import DECODE, LayerBatch
from moetier.traces.channels import channel_cost
from moetier.traces.errors import InputError
from moetier.traces.formats import bit_slice_bytes
from moetier.traces.geometry import Geometry
from moetier.validate.calibrate import ways as listing
from moetier.validate.calibrate.ways import MOST, Kept, Way, kernel_name, ways, whole
from moetier.validate.machines.experts import RandomHidden, WholeKernel

GEOMETRY = Geometry(
    name="small", n_experts=4, top_k=2, moe_layers=[0, 1], n_layers=2, hidden=128,
    moe_intermediate=64, heads=1, kv_heads=1, head_dim=16, vocab=64,
)  # fmt: skip
EXPERT = 2 * 3 * 128 * 64  # bytes in bf16
CHANNELS = Channels(reads="70 %", recovery="none")  # rows are short beside a sector


def one(found: dict[str, Way]) -> Way:
    (way,) = found.values()
    return way


def test_whole_experts_are_one_way() -> None:
    found = whole(WholeKernel(GEOMETRY, "bf16"))

    assert list(found) == [f"whole@{EXPERT}"]
    assert one(found).nbytes == EXPERT
    assert kernel_name(next(iter(found))) == "whole"


def test_bit_slices_are_computed_from_the_first_alone_or_from_both() -> None:
    found = ways(BitSliced(bits=(6, 3), group=32), GEOMETRY, "bf16")
    msb, lsb = bit_slice_bytes(GEOMETRY, 6, 3, 32)
    parts = {way.nbytes: [slot is not None for slot in next(way.slots)] for way in found.values()}

    assert parts == {msb: [True, False], msb + lsb: [True, True]}
    assert set(map(kernel_name, found)) == {"bit-sliced-6-3"}


def test_two_copies_are_two_ways() -> None:
    found = ways(Hobbit(), GEOMETRY, "bf16")

    assert len(found) == 2
    assert set(map(kernel_name, found)) == {"hobbit"}


@pytest.mark.parametrize("part", [Uniform(bits=4, group=32), CHANNELS])
def test_experts_take_turns(part: Any) -> None:
    if part is CHANNELS:
        pytest.importorskip("numba")
    way = next(iter(ways(part, GEOMETRY, "bf16").values()))
    slots = [next(way.slots) for _ in range(MOST)]
    ids = [next(way.ids) for _ in range(MOST)]
    first = slots[0][0]

    assert len({id(slot[0]) for slot in slots}) == MOST == len(set(ids))
    assert next(way.slots)[0] is first
    assert next(way.ids) == ids[0]


def test_large_experts_are_more_than_caches_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "SMALL", EXPERT - 1)
    monkeypatch.setattr(listing, "UNCACHED", 10 * EXPERT - 5)
    way = one(whole(WholeKernel(GEOMETRY, "bf16")))
    seen = {id(next(way.slots)[0]) for _ in range(30)}

    assert len(seen) == 10


def test_channels_are_named_by_what_is_read() -> None:
    pytest.importorskip("numba")
    found = ways(CHANNELS, GEOMETRY, "bf16")
    cost = channel_cost(GEOMETRY)
    kept = cost.kept(CHANNELS.reads)

    assert 0 < kept < cost.channels
    expected = [cost.read_bytes(n) for n in (kept // 2, kept, cost.channels)]
    assert [way.nbytes for way in found.values()] == expected
    assert list(found) == [f"channels@{nbytes}" for nbytes in expected]


def test_recovery_maps_are_among_the_bytes() -> None:
    pytest.importorskip("numba")
    part = Channels(reads="250 %", rank=2)
    cost = channel_cost(GEOMETRY, rank=2)
    sizes = {way.nbytes for way in ways(part, GEOMETRY, "bf16").values()}

    assert cost.recovery_bytes > 0
    assert cost.read_bytes(cost.kept(part.reads)) in sizes


def test_fewer_kept_channels_give_another_output() -> None:
    """The kernel really leaves out what is not kept: half of the channels is not all of them."""
    pytest.importorskip("numba")
    found = list(ways(CHANNELS, GEOMETRY, "bf16").values())
    batch = LayerBatch(0, DECODE, 0, 1, 1, [0])
    x = RandomHidden(128, found[0].experts.kernel.dtype)(batch)
    outputs = []
    for way in found:
        routed = way.experts.routed(batch, [0])[0]
        kept = routed.which.kept
        assert kept is not None
        outputs.append((int(kept.sum()), way.experts.run(next(way.slots), routed, x).numpy()))

    counts = [count for count, _ in outputs]
    assert counts == sorted(set(counts))
    assert not np.allclose(outputs[0][1], outputs[-1][1])


def test_what_no_kernel_computes_is_refused() -> None:
    with pytest.raises(InputError, match="codes of 9 bits"):
        ways(Uniform(bits=9), GEOMETRY, "bf16")
    pytest.importorskip("numba")
    with pytest.raises(InputError, match="bf16 experts"):
        ways(CHANNELS, GEOMETRY, "f32")


@pytest.mark.parametrize(
    ("union", "each", "tokens", "kept"),
    [(4, 4, 1, 4), (4, 4, 3, 4), (2, 4, 1, 2), (16, 4, 1, 16), (16, 4, 2, 8), (16, 4, 8, 4)],
)
def test_the_union_of_what_tokens_keep_is_as_stated(
    union: int, each: int, tokens: int, kept: int
) -> None:
    batch = LayerBatch(0, DECODE, 0, tokens, tokens, [5, 9] * tokens)
    drawing = Kept(union, each, 16)
    mask = drawing.channels(batch)

    assert mask.shape == (2 * tokens, 16)
    assert mask.any(0).sum() == union
    assert set(mask.sum(1).tolist()) == {kept}
    assert (mask[::2] == mask[1::2]).all()  # a token keeps the same of both experts
    assert any((drawing.channels(batch) != mask).any() for _ in range(9)) == (kept < 16)
