"""Positions, phases and validity of a padded batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moetier.traces.batch import DECODE, PREFILL
from moetier.traces.errors import InputError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from moetier.traces.capture.find import find_moe_layers  # noqa: E402  # needs torch
from moetier.traces.capture.hook import ExpertsCall  # noqa: E402
from moetier.traces.capture.rows import Progression, rows  # noqa: E402

MASK = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])


def test_padding_is_invalid_and_positions_count_own_tokens() -> None:
    tokens = Progression(3, MASK, eos=[2]).advance(torch.full((2, 4), 9))

    assert tokens.phase == PREFILL
    assert tokens.request.tolist() == [3, 3, 3, 3, 4, 4, 4, 4]
    assert tokens.position.tolist() == [0, 1, 2, 3, 0, 0, 0, 1]
    assert tokens.valid.tolist() == [True, True, True, True, False, False, True, True]


def test_decode_goes_on_where_each_prompt_ended() -> None:
    batch = Progression(0, MASK, eos=[2])
    batch.advance(torch.full((2, 4), 9))
    first, second = batch.advance(torch.tensor([[9], [9]])), batch.advance(torch.tensor([[9], [9]]))

    assert (first.phase, second.phase) == (DECODE, DECODE)
    assert first.position.tolist() == [4, 2]
    assert second.position.tolist() == [5, 3]


def test_a_request_ends_with_the_sequence_token_it_generated() -> None:
    batch = Progression(0, MASK, eos=[2, 7])
    batch.advance(torch.full((2, 4), 2))  # in a prompt it ends nothing
    steps = [batch.advance(torch.tensor(ids)) for ids in ([[9], [7]], [[9], [0]], [[2], [0]])]

    assert [step.valid.tolist() for step in steps] == [
        [True, False],
        [True, False],
        [False, False],
    ]


def test_a_prompt_may_come_in_pieces() -> None:
    batch = Progression(0, MASK, eos=[])
    pieces = [batch.advance(torch.full((2, 3), 9)), batch.advance(torch.full((2, 1), 9))]

    assert [piece.phase for piece in pieces] == [PREFILL, PREFILL]
    assert pieces[1].position.tolist() == [3, 1]


def test_decoding_more_than_one_token_at_a_time_is_refused() -> None:
    batch = Progression(0, MASK, eos=[])
    batch.advance(torch.full((2, 4), 9))

    with pytest.raises(InputError, match="columns 4 to 9"):
        batch.advance(torch.full((2, 5), 9))


def test_a_piece_across_the_end_of_the_prompt_is_refused() -> None:
    batch = Progression(0, MASK, eos=[])
    batch.advance(torch.full((2, 3), 9))

    with pytest.raises(InputError, match="columns 3 to 5"):
        batch.advance(torch.full((2, 2), 9))


def test_a_layer_that_does_not_see_every_token_is_refused(build: Callable[..., Any]) -> None:
    where = find_moe_layers(build("Mixtral"))[1]
    tokens = Progression(0, MASK, eos=[]).advance(torch.full((2, 4), 9))
    few = torch.zeros(7, 2)
    call = ExpertsCall(0, where, torch.zeros(7, 32), few.long(), few, None, None)

    with pytest.raises(InputError, match="MoE layer 1 got 7 tokens where the forward pass has 8"):
        rows(call, 0, tokens, None)
