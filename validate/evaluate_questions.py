"""This module makes requests out of what a model is asked, and grades what it answers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from moetier.traces.capture.prompts import read_prompts
from moetier.traces.errors import InputError
from moetier.traces.samples.tasks import END, TASKS, Item, held_out_items, most_held_out
from moetier.validate.live_generate import Output, Request

MAX_NEW_TOKENS = 32
"""Of a prompt without an answer."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, the answer to it with whatever ends it (None: unknown), and the task it is of."""

    prompt: str
    answer: str | None = None
    task: str = ""


def from_items(items: Iterable[Item]) -> list[Question]:
    """Return moe-tiny's *items* as questions; their answers end with `END`."""
    return [Question(item.prompt, item.answer + END, item.task) for item in items]


def tiny_questions(n: int, seed: int = 0) -> list[Question]:
    """Return *n* held-out questions of moe-tiny's tasks, the tasks taking turns.

    Raises `InputError` for more than there are.
    """
    most = most_held_out() * len(TASKS)
    if not 1 <= n <= most:
        raise InputError(
            f"{n} items of moe-tiny's tasks", where="evaluate.items", way_out=f"use 1 to {most}"
        )
    per_task = -(-n // len(TASKS))
    items = held_out_items(per_task, seed)
    turns = [items[task * per_task + at] for at in range(per_task) for task in range(len(TASKS))]
    return from_items(turns[:n])


def tiny_calibration(questions: Iterable[Question], per_task: int = 16, seed: int = 0) -> list[str]:
    """Return prompts of moe-tiny's tasks from the training split, none of them in *questions*.

    *per_task* of each task; of one whose table the questions exhaust, as many as are left.
    """
    asked = {question.prompt for question in questions}
    found: list[str] = []
    for task in TASKS.values():
        drawn = task.items(random.Random(f"calibration {seed}/{task.name}"), "train")
        prompts = (item.prompt for item in islice(drawn, 64 * per_task))
        found += list(dict.fromkeys(prompt for prompt in prompts if prompt not in asked))[:per_task]
    return found


def read_questions(path: str | Path) -> list[Question]:
    """Return the questions in *path*: prompts, of which a .jsonl line may have an `answer`, `task`.

    Raises `InputError` for what `read_prompts` refuses, and for an answer that is no text.
    """
    prompts = read_prompts(path)
    if Path(path).suffix != ".jsonl":
        return [Question(prompt) for prompt in prompts]
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    values = [(n, json.loads(line)) for n, line in enumerate(lines, start=1) if line.strip()]
    questions = []
    for prompt, (number, value) in zip(prompts, values, strict=True):
        answer, task = value.get("answer"), value.get("task", "")
        if answer is not None and (not isinstance(answer, str) or not answer):
            raise InputError(
                f"has an 'answer' of {answer!r}",
                where=f"{path}:{number}",
                way_out="write text, or leave it out",
            )
        questions.append(Question(prompt, answer, str(task)))
    return questions


def requests_of(
    tokenizer: Any, questions: Sequence[Question], max_new_tokens: int | None = None
) -> list[Request]:
    """Return a request per question: generate as long as its answer is, or *max_new_tokens*."""
    return [
        Request(
            prompt=encode(tokenizer, question.prompt, f"prompt {number}"),
            limit=max_new_tokens or len(answer_ids(tokenizer, question)) or MAX_NEW_TOKENS,
        )
        for number, question in enumerate(questions, start=1)
    ]


def forced_of(tokenizer: Any, question: Question, request: Request) -> Request:
    """Return *request* forced along the true answer."""
    answer = answer_ids(tokenizer, question)
    return Request(request.prompt, len(answer), answer)


def answer_ids(tokenizer: Any, question: Question) -> tuple[int, ...]:
    """Return the token ids of the answer, none where it is unknown."""
    if not question.answer:
        return ()
    return tuple(tokenizer(question.answer, add_special_tokens=False)["input_ids"])


def encode(tokenizer: Any, text: str, what: str) -> tuple[int, ...]:
    """Return the token ids of a prompt; raise `InputError` when there are none."""
    ids = tuple(tokenizer(text)["input_ids"])
    if not ids:
        raise InputError(f"{what} has no tokens", way_out="leave it out")
    return ids


def is_right(tokenizer: Any, question: Question, output: Output) -> bool:
    """Tell whether *output* begins with the answer, its end included."""
    answer = answer_ids(tokenizer, question)
    if output.tokens[: len(answer)] == answer:
        return True
    written: str = tokenizer.decode(list(output.tokens))
    return question.answer is not None and written.startswith(question.answer)
