"""What a policy inside a model costs beside the model alone."""

from __future__ import annotations

from statistics import median

import pytest

pytest.importorskip("torch", reason="validation needs the extra 'models'")
pytest.importorskip("transformers", reason="validation needs the extra 'models'")

from moetier.experiments.bench import _evaluate_overhead  # needs torch
from moetier.validate.evaluate_bench import overhead

SLICED_LIMIT = 3.0
LIMIT = 2.0
"""On-demand LRU inside moe-tiny takes at most this many times what moe-tiny takes alone."""


@pytest.mark.slow
def test_both_arms_are_timed_in_turn() -> None:
    found = overhead(repeats=2, items=1, long_tokens=4)

    assert len(found.plain) == len(found.evaluated) == 2
    assert all(seconds > 0 for seconds in (*found.plain, *found.evaluated))


@pytest.mark.slow
def test_the_row_says_how_much_more_an_evaluation_takes() -> None:
    row = _evaluate_overhead("evaluate-overhead", 1)

    assert row["name"] == "evaluate-overhead"
    assert row["overhead"] == pytest.approx(row["peer_rate"] / row["rate"])
    assert row["ratio"] == pytest.approx(1 / row["overhead"])


@pytest.mark.benchmark
def test_evaluating_costs_at_most_twice_the_model() -> None:
    found = overhead(repeats=7)

    assert median(found.evaluated) <= LIMIT * median(found.plain)


@pytest.mark.benchmark
def test_evaluating_bit_slices_costs_at_most_three_times_the_model() -> None:
    found = overhead(repeats=7, policy="slicemoe")

    assert median(found.evaluated) <= SLICED_LIMIT * median(found.plain)
