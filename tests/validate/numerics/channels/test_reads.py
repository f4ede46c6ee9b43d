"""Check that a batch's reads count every expert's channels once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moetier.traces.channels import ChannelCost
from moetier.validate.numerics.channels.experts import ChannelExperts
from moetier.validate.numerics.channels.keep import TopK
from moetier.validate.numerics.channels.reads import Reads, batch_reads
from moetier.validate.numerics.channels.sketch import ChannelSettings
from moetier.validate.numerics.experts import ExpertMatrices

COST = ChannelCost(sketch_bytes=100, recovery_bytes=10, channel_bytes=7, channels=4, full_bytes=900)


def test_the_union_of_tokens_is_read_once() -> None:
    ids = torch.tensor([[0, 5], [5, 2]])
    kept = torch.tensor(
        [[[1, 0, 0, 0], [1, 1, 0, 0]], [[0, 1, 1, 0], [0, 0, 0, 0]]], dtype=torch.bool
    )
    reads = batch_reads(COST, ids, kept)

    # expert 0: one channel; expert 5: three in all; expert 2: none
    assert reads == Reads(3 * 110 + 7 * (1 + 3 + 0), 3 * 900)


def test_reads_add_up() -> None:
    both = Reads(10, 100) + Reads(30, 100)

    assert both == Reads(40, 200)
    assert both.share == 0.2


def test_nothing_routed_has_no_share() -> None:
    none = batch_reads(COST, torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2, 4).bool())

    assert none == Reads()
    assert none.share is None


def test_one_token_reads_its_target(
    make: Callable[..., ExpertMatrices], draw: Callable[..., tuple[Tensor, Tensor, Tensor]]
) -> None:
    channels = ChannelExperts.build(make(6, 96, 64), ChannelSettings(rank=2))
    cost = channels.cost(2)
    k = cost.kept(0.4)
    batch = draw(1, 6, 64)
    reads = batch_reads(cost, batch[1], channels.forward(*batch, TopK(k)).kept)

    assert reads.share == float(cost.share(k))
    assert 0.39 < (reads.share or 0) <= 0.4
