"""This module makes the low-rank maps that stand in for channels that are not read.

The down projection is about U V^T of rank r, the truncated singular value decomposition: V holds
the first r right singular vectors, and U = Wd V. With the screened activations of the skipped
channels h, U (V^T h) replaces Wd h.

Shapes: E experts, H hidden, I channels, r rank.
"""

from __future__ import annotations

import torch
from torch import Tensor


def recovery_maps(down: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return U, (..., H, r), and V, (..., I, r), in bfloat16 for *down*, (..., H, I)."""
    exact = down.double()
    # Eigenvectors of the smaller Gram matrix give the same spaces as an SVD, many times faster.
    if down.shape[-1] <= down.shape[-2]:
        right = _first(exact.mT @ exact, rank)
        left = exact @ right
    else:
        basis = _first(exact @ exact.mT, rank)
        right, left = exact.mT @ basis, basis
    return left.to(torch.bfloat16), right.to(torch.bfloat16)


def _first(gram: Tensor, rank: int) -> Tensor:
    """Return the eigenvectors of the *rank* largest eigenvalues, (..., n, rank)."""
    vectors: Tensor = torch.linalg.eigh(gram).eigenvectors
    return vectors.flip(-1)[..., :rank]
