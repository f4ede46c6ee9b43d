"""This module decides which channels of an expert are computed exactly.

A keep rule turns scores, (T, K, I) for T tokens, K experts of each and I channels, into a mask of
the same shape. `TopK` keeps as many of every expert, `TokenTopK` as many for every token, wherever
among its experts they are. `Threshold` keeps what scores above a number calibrated beforehand, as
Prox does, so that what it reads depends on the token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moetier.traces.errors import InputError


class Keep(Protocol):
    """A keep rule; larger scores matter more."""

    def __call__(self, scores: Tensor) -> Tensor:
        """Return the mask, in bool, of the channels to compute for *scores*, both (T, K, I)."""
        ...


@dataclass(frozen=True, slots=True)
class TopK:
    """Keep the *k* channels of every expert that score highest; of equals the lower channel."""

    k: int

    def __post_init__(self) -> None:
        """Refuse a negative *k*."""
        if self.k < 0:
            raise InputError(f"cannot keep {self.k} channels", way_out="choose 0 or more")

    def __call__(self, scores: Tensor) -> Tensor:
        """Return the mask; see `Keep`. A *k* beyond the layer keeps all of it."""
        mask = torch.zeros_like(scores, dtype=torch.bool)
        if self.k >= scores.shape[-1]:
            return ~mask
        order = torch.argsort(scores, dim=-1, descending=True, stable=True)
        return mask.scatter_(-1, order[..., : self.k], True)


@dataclass(frozen=True, slots=True)
class TokenTopK:
    """Keep the K *k* best channels of every token, over its K experts together."""

    k: int  # per expert, on average

    def __call__(self, scores: Tensor) -> Tensor:
        """Return the mask; see `Keep`. A token reads the same as under `TopK`."""
        best = TopK(self.k * scores.shape[-2])
        return best(scores.flatten(-2)).view_as(scores)


@dataclass(frozen=True, slots=True)
class Threshold:
    """Keep every channel that scores at least *least*."""

    least: float

    def __call__(self, scores: Tensor) -> Tensor:
        """Return the mask; see `Keep`."""
        return scores >= self.least


def calibrated(scores: Iterable[Tensor], k: int) -> Threshold:
    """Return the threshold that keeps *k* channels of an expert on average over *scores*.

    Scores, each (T, K, I), are one layer's (`ChannelExperts.scores`) on calibration tokens. Of
    equals more may be kept.

    Raises:
        InputError: If there are no scores, one is NaN, or *k* is negative.
    """
    if k < 0:
        raise InputError(f"cannot keep {k} channels", way_out="choose 0 or more")
    parts = [part.reshape(-1, part.shape[-1]) for part in scores]
    if not sum(len(part) for part in parts):
        raise InputError("no token to calibrate a threshold on", way_out="give it more tokens")
    every = torch.cat(parts)
    if bool(every.isnan().any()):
        raise InputError("a score is NaN", where="calibration")
    wanted = min(k, every.shape[-1]) * len(every)
    if not wanted:
        return Threshold(math.inf)
    flat = every.flatten()
    return Threshold(float(flat.kthvalue(len(flat) - wanted + 1).values))
