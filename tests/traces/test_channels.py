"""Tests of the bytes that a channel reader reads."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetier.traces.channels import ChannelCost, channel_cost, cost_of_sizes, k_for, row_trit_bytes
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry, load_geometry

QWEN = load_geometry("qwen3-30b-a3b")  # 2048 inputs, 768 channels


def test_bytes_of_a_published_expert() -> None:
    cost = channel_cost(QWEN, rank=32)

    # 2048 trits are 409 bytes and 3 trits; rows: gate and up
    assert cost == ChannelCost(
        sketch_bytes=2 * 768 * 410 + 2 * 768 * 2 + 768 * 2,
        recovery_bytes=32 * (2048 + 768) * 2,
        channel_bytes=3 * 2048 * 2,
        channels=768,
        full_bytes=3 * 2048 * 768 * 2,
    )


def test_the_sketch_is_about_seven_percent() -> None:
    cost = channel_cost(QWEN)

    # 1.6 bits for two thirds of the weights are 6.67 % of bf16; scales and norms come on top
    assert 0.0667 < cost.sketch_bytes / cost.full_bytes < 0.07


def test_a_target_leaves_room_for_whole_channels() -> None:
    cost = channel_cost(QWEN, rank=32)
    k = k_for(0.178, QWEN, rank=32)

    assert cost.share(k) <= Fraction(178, 1000) < cost.share(k + 1)


def test_rank_eats_the_budget() -> None:
    kept = [k_for(0.178, QWEN, rank=rank) for rank in (0, 16, 32, 64)]

    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 4


def test_a_float_means_its_decimal() -> None:
    cost = ChannelCost(0, 0, 1, 1000, 1000)

    assert cost.kept(0.178) == 178  # as a binary fraction it would be a little less
    assert cost.kept(Fraction(178, 1000)) == 178


def test_every_row_takes_whole_sectors() -> None:
    cost = cost_of_sizes(33, 7)

    assert cost.channel_bytes == 3 * 96  # 66 bytes are three sectors
    assert cost.full_bytes == 1408  # 1386 bytes in one piece
    assert cost.sketch_bytes == 128 + 32 + 32  # 14 rows of 7 bytes, 14 scales, 7 norms


def test_groups_start_at_bytes_and_have_scales() -> None:
    assert row_trit_bytes(10, None) == 2
    assert row_trit_bytes(10, 3) == 4  # 3 + 3 + 3 + 1
    assert row_trit_bytes(10, 99) == 2

    fine, coarse = channel_cost(QWEN, group=64), channel_cost(QWEN)

    assert fine.sketch_bytes - coarse.sketch_bytes == 1536 * (32 * 13 - 410) + 1536 * 31 * 2


def test_biases_are_read_too() -> None:
    biased = QWEN.model_copy(update={"expert_biases": True})
    more = channel_cost(biased).sketch_bytes - channel_cost(QWEN).sketch_bytes

    assert more == (2 * 768 + 2048) * 2


def test_weights_below_a_byte() -> None:
    cost = channel_cost(QWEN, bytes_per_weight=Fraction(17, 32))

    assert cost.channel_bytes == 3 * 2048 * 17 // 32
    assert cost.sketch_bytes == channel_cost(QWEN).sketch_bytes


def test_no_more_than_all_channels() -> None:
    assert channel_cost(QWEN, rank=8).kept(5.0) == 768


def test_a_budget_that_just_pays_the_sketch_keeps_nothing() -> None:
    cost = channel_cost(QWEN, rank=32)

    assert cost.kept(cost.smallest) == 0
    with pytest.raises(InputError, match="smallest possible reads"):
        cost.kept(cost.smallest - Fraction(1, 10**9))


@pytest.mark.parametrize("reads", [0, 0.0, 0.05])
def test_a_budget_too_small_names_the_smallest(reads: float) -> None:
    with pytest.raises(InputError, match=r"smallest possible reads are 8\.64 %"):
        channel_cost(QWEN, rank=32).kept(reads)


@pytest.mark.parametrize("reads", [float("nan"), float("inf"), -0.1, Fraction(-1, 5)])
def test_reads_must_be_a_share(reads: float) -> None:
    with pytest.raises(InputError, match="share of an expert's bytes"):
        channel_cost(QWEN).kept(reads)


@pytest.mark.parametrize("kept", [-1, 769])
def test_kept_channels_must_exist(kept: int) -> None:
    with pytest.raises(InputError, match="of 768 channels"):
        channel_cost(QWEN).read_bytes(kept)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": None}, "unknown"),
        ({"moe_intermediate": None}, "unknown"),
        ({"expert_matrices": 2}, "no gate"),
    ],
)
def test_experts_that_have_no_channels(change: dict[str, object], message: str) -> None:
    geometry = Geometry.model_validate(QWEN.model_dump() | change)

    with pytest.raises(InputError, match=message):
        channel_cost(geometry)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"rank": -1}, "rank -1"),
        ({"rank": 769}, "choose 0 to 768"),
        ({"group": 0}, "group of 0"),
        ({"bytes_per_weight": 0}, "0 bytes"),
    ],
)
def test_senseless_numbers(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        channel_cost(QWEN, **setting)


@given(
    hidden=st.integers(1, 300),
    channels=st.integers(1, 80),
    rank=st.integers(0, 5),
    group=st.none() | st.integers(1, 64),
    reads=st.fractions(0, 2),
)
def test_reads_never_exceed_the_target(
    hidden: int, channels: int, rank: int, group: int | None, reads: Fraction
) -> None:
    cost = cost_of_sizes(hidden, channels, rank=min(rank, hidden, channels), group=group)
    if reads < cost.smallest:
        with pytest.raises(InputError, match="do not pay"):
            cost.kept(reads)
        return
    kept = cost.kept(reads)

    assert cost.share(kept) <= reads
    assert kept == channels or cost.share(kept + 1) > reads
