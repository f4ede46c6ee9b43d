"""Check the recovery maps against numpy's singular value decomposition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moetier.validate.numerics.channels.recovery import recovery_maps


@pytest.mark.parametrize("shape", [(12, 7), (7, 12), (9, 9)])
@pytest.mark.parametrize("rank", [1, 3, 7])
def test_maps_are_the_truncated_decomposition(shape: tuple[int, int], rank: int) -> None:
    down = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, right = recovery_maps(down, rank)
    u, s, vt = np.linalg.svd(down.numpy(), full_matrices=False)
    best = (u[:, :rank] * s[:rank]) @ vt[:rank]
    error = np.abs((left.float() @ right.float().T).numpy() - best).max()

    assert (left.shape, right.shape) == ((shape[0], rank), (shape[1], rank))
    assert error < 0.03 * s[0]  # bfloat16 keeps 8 bits


def test_rank_zero_maps_to_nothing() -> None:
    left, right = recovery_maps(torch.randn(5, 4), 0)

    assert (left.shape, right.shape) == ((5, 0), (4, 0))
