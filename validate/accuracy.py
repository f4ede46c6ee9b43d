"""This module measures how well a model answers: exact match, and how likely the answers are.

Exact match is by greedy generation, as a user would run the model. The negative log-likelihood of
the answer, given the prompt, is the finer measure: it moves long before an answer flips, and two
models that saw the same items can be compared item by item.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from moetier.traces.samples.tasks import END, Item

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""


class AnswerScore(NamedTuple):
    """One item's score: the answer's negative log-likelihood in nats, its end included.

    *greedy* says whether every character of the answer is the most likely one, given the true
    ones before it - which is exactly when greedy generation writes the answer.
    """

    nll: float
    greedy: bool


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over *n* items and its standard error."""

    mean: float
    standard_error: float
    n: int


@dataclass(frozen=True, slots=True)
class Difference:
    """A mean difference and the 95 % confidence interval around it."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Exact match, overall and per task, and the items' outcomes in the order given."""

    overall: Estimate
    by_task: dict[str, Estimate]
    correct: tuple[bool, ...]


def exact_match(
    model: Any, tokenizer: Any, items: Sequence[Item], batch_size: int = 64
) -> Accuracy:
    """Let *model* answer *items* by greedy generation and compare with the answers.

    Prompts are batched by length, so no padding can reach the model.
    """
    correct = [False] * len(items)
    for positions in _batches([len(item.prompt) for item in items], batch_size):
        chosen = [items[position] for position in positions]
        prompts = torch.tensor([tokenizer.encode(item.prompt) for item in chosen])
        longest = max(len(item.answer) for item in chosen) + len(END)
        with torch.inference_mode():
            output = model.generate(
                prompts.to(model.device),
                attention_mask=torch.ones_like(prompts).to(model.device),
                max_new_tokens=longest,
                do_sample=False,
            )
        for position, item, row in zip(positions, chosen, output, strict=True):
            written = tokenizer.decode(row[prompts.shape[1] :].tolist())
            correct[position] = written.startswith(item.answer + END)
    return summarise(items, correct)


def summarise(items: Sequence[Item], correct: Sequence[bool]) -> Accuracy:
    """Average the items' outcomes, overall and per task."""
    by_task: dict[str, list[float]] = defaultdict(list)
    for item, right in zip(items, correct, strict=True):
        by_task[item.task].append(float(right))
    return Accuracy(
        overall=estimate([float(right) for right in correct]),
        by_task={task: estimate(values) for task, values in by_task.items()},
        correct=tuple(correct),
    )


def answer_scores(
    model: Any, tokenizer: Any, items: Sequence[Item], batch_size: int = 128
) -> list[AnswerScore]:
    """Score every item's answer in one forward pass per batch, in the order given."""
    scores: list[AnswerScore | None] = [None] * len(items)
    for positions in _batches([len(item.text) for item in items], batch_size):
        ids = torch.tensor([tokenizer.encode(items[position].text) for position in positions])
        with torch.inference_mode():
            logits = model(input_ids=ids.to(model.device), use_cache=False).logits.cpu()
        for position, row, row_logits in zip(positions, ids, logits, strict=True):
            start = len(items[position].prompt)
            scores[position] = _score(row_logits[start - 1 : -1], row[start:])
    return [score for score in scores if score is not None]


def answer_nll(
    model: Any, tokenizer: Any, items: Sequence[Item], batch_size: int = 128
) -> list[float]:
    """Return every item's negative log-likelihood of the answer and its end, in nats."""
    return [score.nll for score in answer_scores(model, tokenizer, items, batch_size)]


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of *values* and its standard error (0 for a single value)."""
    n = len(values)
    if n == 0:
        raise ValueError("no values to average; give at least one item")
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, 0.0, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return Estimate(mean, math.sqrt(variance / n), n)


def paired_difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """Return the mean of *a* - *b*, item by item, with its normal 95 % confidence interval."""
    if len(a) != len(b):
        raise ValueError(f"{len(a)} values cannot be paired with {len(b)}; score the same items")
    result = estimate([x - y for x, y in zip(a, b, strict=True)])
    half = Z_95 * result.standard_error
    return Difference(result.mean, result.mean - half, result.mean + half, result.n)


def _score(logits: Tensor, targets: Tensor) -> AnswerScore:
    nll = functional.cross_entropy(logits.double(), targets, reduction="sum")
    return AnswerScore(float(nll), bool((logits.argmax(-1) == targets).all()))


def _batches(lengths: Sequence[int], batch_size: int) -> Iterable[list[int]]:
    """Group positions of equal length into batches of at most *batch_size*."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for position, length in enumerate(lengths):
        by_length[length].append(position)
    for _, positions in sorted(by_length.items()):
        for start in range(0, len(positions), batch_size):
            yield positions[start : start + batch_size]
