"""This module measures how uneven routing is, from the counts (layers, experts) of requests."""

from __future__ import annotations

from typing import Any

import numpy as np

HOT_SHARE = 0.1
"""`hot_share` counts the lookups of this share of each layer's experts, the most asked."""


def hot_share(counts: Any) -> float:
    """Return the share of all counts on the most asked tenth of each layer's experts."""
    n = counts.shape[1]
    hot = max(1, round(HOT_SHARE * n))
    return float(np.sort(counts, axis=1)[:, n - hot :].sum() / counts.sum())


def zipf_exponent(counts: Any) -> float | None:
    """Return Zipf's exponent: the slope of log count over log rank, negated, mean over layers.

    Least squares over the experts that were asked for; None where no layer has two of them.
    """
    slopes = []
    for layer in counts:
        positive = np.sort(layer[layer > 0])[::-1].astype(float)
        if len(positive) > 1:
            ranks = np.log(np.arange(1, len(positive) + 1))
            slopes.append(-float(np.polyfit(ranks, np.log(positive), 1)[0]))
    return float(np.mean(slopes)) if slopes else None


def entropy(counts: Any) -> float | None:
    """Return the entropy of the counts over that of a uniform choice, mean over layers.

    None with one expert, where there is no choice.
    """
    used = counts[counts.sum(axis=1) > 0].astype(float)
    if counts.shape[1] == 1:
        return None
    share = used / used.sum(axis=1, keepdims=True)
    terms = np.where(share > 0, share * np.log(np.where(share > 0, share, 1)), 0)
    return float(np.mean(-terms.sum(axis=1)) / np.log(counts.shape[1]))


def dispersion(counts: Any, rows: list[int], k: int) -> float | None:
    """Return the variance of the counts over what uniform draws of k distinct experts give.

    In T such draws each expert's count is binomial with chance p = k/E: variance T p (1 - p).
    *rows* are the T of each layer. None where every token takes every expert.
    """
    n = counts.shape[1]
    chance = k / n
    if chance == 1:
        return None
    ratios = [
        float(np.mean((layer - t * chance) ** 2) / (t * chance * (1 - chance)))
        for layer, t in zip(counts, rows, strict=True)
        if t
    ]
    return float(np.mean(ratios))
