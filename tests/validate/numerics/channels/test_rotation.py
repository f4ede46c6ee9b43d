"""Check that the rotation is the orthogonal matrix that it claims to be."""

from __future__ import annotations

import math

import pytest
import torch

from moetier.traces.errors import InputError
from moetier.validate.numerics.channels.rotation import rotation


def sylvester(size: int) -> torch.Tensor:
    """Return the Hadamard matrix of *size* from its definition: the parity of i AND j."""
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)])


@pytest.mark.parametrize(("hidden", "block"), [(1, 1), (7, 1), (16, 16), (40, 8), (96, 32)])
def test_rotation_is_blocks_of_hadamard_matrices_with_signs(hidden: int, block: int) -> None:
    turn = rotation(hidden, seed=3)
    expected = (
        torch.kron(torch.eye(hidden // block), sylvester(block)) * turn.signs / math.sqrt(block)
    )

    assert turn.block == block
    torch.testing.assert_close(turn.apply(torch.eye(hidden)).T, expected)


@pytest.mark.parametrize("hidden", [2, 45, 128, 2880])
def test_products_survive_the_rotation(hidden: int) -> None:
    rng = torch.Generator().manual_seed(hidden)
    w, x = torch.randn(3, hidden, generator=rng), torch.randn(5, hidden, generator=rng)
    turn = rotation(hidden, seed=0)

    torch.testing.assert_close(turn.apply(w) @ turn.apply(x).T, w @ x.T, atol=1e-3, rtol=1e-4)


def test_an_outlier_is_spread_over_its_block() -> None:
    x = torch.zeros(256)
    x[17] = 16.0

    assert rotation(256, 0).apply(x).abs().tolist() == [1.0] * 256


def test_shapes_and_types_are_kept_apart() -> None:
    turn = rotation(8, 0)

    assert turn.apply(torch.ones(2, 3, 8, dtype=torch.bfloat16)).dtype == torch.float32
    assert turn.apply(torch.ones(2, 3, 8)).shape == (2, 3, 8)


def test_the_seed_decides_the_signs() -> None:
    assert rotation(64, 1).signs.equal(rotation(64, 1).signs)
    assert not rotation(64, 1).signs.equal(rotation(64, 2).signs)
    assert set(rotation(64, 1).signs.tolist()) == {-1.0, 1.0}


def test_nothing_cannot_be_rotated() -> None:
    with pytest.raises(InputError, match="0 inputs"):
        rotation(0, 0)
