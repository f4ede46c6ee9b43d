"""Check the keep rules by hand and against sorting."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moetier.traces.errors import InputError
from moetier.validate.numerics.channels.keep import Threshold, TokenTopK, TopK, calibrated


def test_top_k_keeps_as_many_for_every_token() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, 0.0], [9.0, 0.0, 0.0, 8.0]])

    assert TopK(2)(scores).tolist() == [[False, True, True, False], [True, False, False, True]]


def test_of_equals_the_lower_channel_is_kept() -> None:
    assert TopK(2)(torch.ones(1, 4)).tolist() == [[True, True, False, False]]


@pytest.mark.parametrize(("k", "kept"), [(0, 0), (3, 3), (4, 4), (400, 4)])
def test_k_up_to_and_beyond_the_layer(k: int, kept: int) -> None:
    assert TopK(k)(torch.rand(5, 4)).sum(1).tolist() == [kept] * 5


def test_a_token_s_channels_may_lie_in_any_of_its_experts() -> None:
    scores = torch.tensor([[[1.0, 9.0], [8.0, 7.0]], [[5.0, 5.0], [0.0, 0.0]]])

    assert TokenTopK(1)(scores).int().tolist() == [[[0, 1], [1, 0]], [[1, 1], [0, 0]]]
    assert bool(TokenTopK(2)(scores).all())


def test_a_negative_k_is_refused() -> None:
    with pytest.raises(InputError, match="cannot keep -1"):
        TopK(-1)
    with pytest.raises(InputError, match="cannot keep -1"):
        calibrated([torch.ones(1, 4)], -1)


def test_a_threshold_keeps_what_the_token_has() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, 0.0]])

    assert Threshold(2.0)(scores).tolist() == [[False, True, True], [False, False, False]]


@given(
    values=st.lists(
        st.lists(st.floats(0, 10, width=32), min_size=6, max_size=6, unique=True),
        min_size=1,
        max_size=8,
    ),
    k=st.integers(0, 9),
)
def test_calibration_keeps_k_on_average(values: list[list[float]], k: int) -> None:
    scores = torch.tensor(values)
    kept = int(calibrated([scores[:1], scores[1:]], k)(scores).sum())
    wanted = min(k, 6) * len(values)
    ranked = scores.flatten().sort(descending=True).values
    border = float(ranked[wanted - 1]) if wanted else None

    # of scores equal to the border all are kept, of others exactly those wanted
    assert kept == (int((scores >= border).sum()) if border is not None else 0)
    assert kept >= wanted


def test_another_text_is_read_by_another_share() -> None:
    rule = calibrated([torch.rand(50, 40, generator=torch.Generator().manual_seed(0))], 8)
    quieter = torch.rand(50, 40, generator=torch.Generator().manual_seed(1)) * 0.9

    assert float(rule(quieter).sum(1).float().mean()) < 8


def test_calibration_needs_scores() -> None:
    with pytest.raises(InputError, match="no token"):
        calibrated([], 3)
    with pytest.raises(InputError, match="NaN"):
        calibrated([torch.tensor([[1.0, float("nan")]])], 1)
