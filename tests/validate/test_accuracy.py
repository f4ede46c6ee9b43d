"""Check the measures of accuracy against hand computations and a scripted model."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moetier.traces.samples.tasks import END, TASKS, Item
from moetier.validate.accuracy import (
    Accuracy,
    Estimate,
    answer_nll,
    answer_scores,
    estimate,
    exact_match,
    paired_difference,
    summarise,
)

LETTERS = END + "abcdefghijklmnopqrstuvwxyz 0123456789=,"
ITEMS = [
    TASKS["copy"].item("abc", "abc"),
    TASKS["next"].item("ab", "bc"),
    TASKS["copy"].item("xyz", "xyz"),
    TASKS["add"].item("1,2", "3"),
]


class CharacterTokenizer:
    """One token per character, as moe-tiny's."""

    def encode(self, text: str) -> list[int]:
        """Return the characters' ids."""
        return [LETTERS.index(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        """Return the ids' characters."""
        return "".join(LETTERS[i] for i in ids)


class ScriptedModel:
    """Give the right next character a known probability, and write what it is told to write."""

    device = torch.device("cpu")

    def __init__(self, probability: float, written: dict[str, str] | None = None) -> None:
        """Set the right characters' *probability* and the text *written* after each prompt."""
        self.probability = probability
        self.written = written or {}
        self.batch_sizes: list[int] = []

    def __call__(self, input_ids: Tensor, use_cache: bool) -> Any:
        """Return logits in which the true next token has the wanted probability."""
        assert not use_cache
        self.batch_sizes.append(len(input_ids))
        other = (1 - self.probability) / (len(LETTERS) - 1)
        logits = torch.full((*input_ids.shape, len(LETTERS)), math.log(other))
        following = input_ids.roll(-1, dims=1).unsqueeze(-1)
        return SimpleNamespace(logits=logits.scatter(-1, following, math.log(self.probability)))

    def generate(
        self, prompts: Tensor, attention_mask: Tensor, max_new_tokens: int, do_sample: bool
    ) -> Tensor:
        """Append the scripted text of each prompt, cut or padded to *max_new_tokens*."""
        assert attention_mask.all()
        assert not do_sample
        self.batch_sizes.append(len(prompts))
        tokenizer = CharacterTokenizer()
        rows = []
        for prompt in prompts.tolist():
            text = self.written[tokenizer.decode(prompt)].ljust(max_new_tokens)[:max_new_tokens]
            rows.append(prompt + tokenizer.encode(text))
        return torch.tensor(rows)


def truth(items: list[Item]) -> dict[str, str]:
    return {item.prompt: item.answer + END for item in items}


def test_nll_counts_the_answer_and_its_end() -> None:
    nll = answer_nll(ScriptedModel(0.5), CharacterTokenizer(), ITEMS)

    assert nll == pytest.approx([-math.log(0.5) * n for n in (4, 3, 4, 2)])


def test_nll_by_hand() -> None:
    """Two characters after the prompt, with logits 0, 1, 2: softmax written out."""

    class Fixed:
        device = torch.device("cpu")

        def __call__(self, input_ids: Tensor, use_cache: bool) -> Any:
            return SimpleNamespace(logits=torch.tensor([[[0.0, 1.0, 2.0]] * input_ids.shape[1]]))

    class Three:
        def encode(self, text: str) -> list[int]:
            return ["\na=".index(letter) for letter in text]

    item = Item(task="copy", prompt="==", answer="a", finite=False)
    total = math.exp(0) + math.exp(1) + math.exp(2)
    expected = -math.log(math.exp(1) / total) - math.log(math.exp(0) / total)

    assert answer_nll(Fixed(), Three(), [item]) == pytest.approx([expected])


@pytest.mark.parametrize(("probability", "greedy"), [(0.5, True), (0.01, False)])
def test_greedy_says_whether_the_answer_is_most_likely(probability: float, greedy: bool) -> None:
    scores = answer_scores(ScriptedModel(probability), CharacterTokenizer(), ITEMS)

    assert [score.greedy for score in scores] == [greedy] * len(ITEMS)


def test_exact_match_of_right_answers() -> None:
    accuracy = exact_match(ScriptedModel(0.5, truth(ITEMS)), CharacterTokenizer(), ITEMS)

    assert accuracy.correct == (True,) * 4
    assert accuracy.overall == Estimate(1.0, 0.0, 4)


@pytest.mark.parametrize("wrong", ["abd" + END, "ab" + END, "abca" + END, "abc ", ""])
def test_exact_match_is_exact(wrong: str) -> None:
    written = truth(ITEMS) | {ITEMS[0].prompt: wrong}
    accuracy = exact_match(ScriptedModel(0.5, written), CharacterTokenizer(), ITEMS)

    assert accuracy.correct == (False, True, True, True)


def test_what_follows_the_end_does_not_matter() -> None:
    written = truth(ITEMS) | {ITEMS[3].prompt: "3" + END + "add"}
    accuracy = exact_match(ScriptedModel(0.5, written), CharacterTokenizer(), ITEMS)

    assert accuracy.correct == (True,) * 4


def test_items_keep_their_order_whatever_their_lengths() -> None:
    written = truth(ITEMS) | {ITEMS[2].prompt: "xyx" + END}
    accuracy = exact_match(ScriptedModel(0.5, written), CharacterTokenizer(), ITEMS)

    assert accuracy.correct == (True, True, False, True)
    assert accuracy.by_task["copy"] == Estimate(0.5, 0.5, 2)
    assert accuracy.by_task["add"] == Estimate(1.0, 0.0, 1)


def test_batches_hold_equal_lengths_and_no_more_than_asked() -> None:
    model = ScriptedModel(0.5, truth(ITEMS))
    exact_match(model, CharacterTokenizer(), ITEMS * 3, batch_size=4)

    assert sorted(model.batch_sizes) == [2, 2, 4, 4]


def test_summary_per_task() -> None:
    accuracy = summarise(ITEMS, [True, False, True, True])

    assert accuracy == Accuracy(
        overall=Estimate(0.75, 0.25, 4),
        by_task={
            "copy": Estimate(1.0, 0.0, 2),
            "next": Estimate(0.0, 0.0, 1),
            "add": Estimate(1.0, 0.0, 1),
        },
        correct=(True, False, True, True),
    )


def test_standard_error_closed_form() -> None:
    """1, 2, 3, 4: variance 5/3, so the standard error is sqrt(5/12)."""
    result = estimate([1.0, 2.0, 3.0, 4.0])

    assert result.mean == 2.5
    assert result.standard_error == pytest.approx(math.sqrt(5 / 12))


def test_a_mean_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values to average"):
        estimate([])


def test_paired_difference_closed_form() -> None:
    """Differences 0, 1, 2, 3: mean 1.5, standard error sqrt(5/12)."""
    result = paired_difference([1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 1.0, 1.0])
    half = 1.959963984540054 * math.sqrt(5 / 12)

    assert result.mean == 1.5
    assert (result.low, result.high) == pytest.approx((1.5 - half, 1.5 + half))
    assert result.n == 4


def test_pairing_removes_what_both_share() -> None:
    easy_and_hard = [0.0, 100.0, 5.0, 40.0]
    result = paired_difference([value + 1 for value in easy_and_hard], easy_and_hard)

    assert (result.mean, result.low, result.high) == (1.0, 1.0, 1.0)


def test_swapping_the_arms_flips_the_interval() -> None:
    a, b = [1.0, 4.0, 2.0], [0.5, 5.0, 1.0]
    forth, back = paired_difference(a, b), paired_difference(b, a)

    assert (back.mean, back.low, back.high) == (-forth.mean, -forth.high, -forth.low)


def test_unpaired_values_are_refused() -> None:
    with pytest.raises(ValueError, match="2 values cannot be paired with 3"):
        paired_difference([1.0, 2.0], [1.0, 2.0, 3.0])
