"""Tests of measures of skew against counts whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from moetier.traces.skew import dispersion, entropy, hot_share, zipf_exponent

EVEN = np.full((2, 20), 6)
ONE = np.zeros((1, 20), int)
ONE[0, 4] = 30


def test_hot_share_of_even_counts_is_the_share_of_experts() -> None:
    assert hot_share(EVEN) == 0.1
    assert hot_share(ONE) == 1.0
    assert hot_share(np.array([[1, 3]])) == 0.75  # never less than one expert


def test_the_exponent_of_exact_zipf_counts_is_found() -> None:
    ranks = np.arange(1, 21)
    counts = np.stack([1e9 / ranks**0.8, 1e9 / ranks[::-1] ** 1.2])

    assert zipf_exponent(counts) == pytest.approx(1.0, abs=1e-6)
    assert zipf_exponent(EVEN) == pytest.approx(0.0, abs=1e-12)
    assert zipf_exponent(ONE) is None


def test_entropy_goes_from_nought_to_one() -> None:
    assert entropy(EVEN) == pytest.approx(1.0)
    assert entropy(ONE) == 0.0
    assert entropy(np.array([[1, 1, 0, 0], [0, 0, 0, 0]])) == pytest.approx(0.5)
    assert entropy(np.array([[5]])) is None


def test_dispersion_is_one_for_binomial_counts() -> None:
    random = np.random.Generator(np.random.PCG64(0))
    counts = random.binomial(1000, 0.25, (200, 16))

    assert dispersion(counts, [1000] * 200, 4) == pytest.approx(1.0, abs=0.05)


def test_dispersion_of_one_hot_expert_by_hand() -> None:
    # 10 tokens, k 1 of 2, all on the first: (5^2 + 5^2) / 2 over 10 * 1/4
    assert dispersion(np.array([[10, 0]]), [10], 1) == 10.0
    assert dispersion(np.array([[10, 0], [0, 0]]), [10, 0], 1) == 10.0
    assert dispersion(np.array([[10, 10]]), [10], 2) is None
