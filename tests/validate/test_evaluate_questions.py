"""Questions: where they come from, what is requested of the model, and when it is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="validation needs the extra 'models'")
pytest.importorskip("transformers", reason="validation needs the extra 'models'")

from moetier.traces.errors import InputError  # needs torch
from moetier.traces.samples.tasks import TASKS, held_out_items, most_held_out
from moetier.validate.evaluate_questions import (
    MAX_NEW_TOKENS,
    Question,
    answer_ids,
    encode,
    forced_of,
    from_items,
    is_right,
    read_questions,
    requests_of,
    tiny_questions,
)
from moetier.validate.live_generate import Output, Request


class Letters:
    """One token per character; a prompt begins with 1."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Return the ids of *text*."""
        ids = [ord(letter) for letter in text]
        return {"input_ids": [1, *ids] if add_special_tokens and text else ids}

    def decode(self, ids: list[int]) -> str:
        """Return the text of *ids*; 200 stands for two letters."""
        return "".join("ab" if i == 200 else chr(i) for i in ids)


TOKENIZER: Any = Letters()


def output(text: str) -> Output:
    return Output(tuple(map(ord, text)), (), "")


def test_items_become_questions_that_end() -> None:
    item = TASKS["add"].item("1,2", "3")

    assert from_items([item]) == [Question("add 1,2=", "3\n", "add")]


def test_tasks_take_turns() -> None:
    questions = tiny_questions(13)

    assert [question.task for question in questions] == [*TASKS, *list(TASKS)[:2]]
    assert set(questions) <= set(from_items(held_out_items(2)))
    assert tiny_questions(11, seed=1) != tiny_questions(11)


@pytest.mark.parametrize("n", [0, most_held_out() * len(TASKS) + 1])
def test_more_items_than_there_are_is_refused(n: int) -> None:
    with pytest.raises(InputError, match=rf"evaluate.items: {n} items of .* use 1 to "):
        tiny_questions(n)


def test_all_items_there_are_can_be_had() -> None:
    n = most_held_out() * len(TASKS)

    assert len({question.prompt for question in tiny_questions(n)}) == n


def test_a_text_file_has_prompts_only(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("one\n\ntwo\n")

    assert read_questions(path) == [Question("one"), Question("two")]


def test_a_jsonl_file_may_have_answers_and_tasks(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    rows = [{"prompt": "a", "answer": "b", "task": "t"}, {"prompt": "c"}]
    path.write_text("\n\n".join(map(json.dumps, rows)))

    assert read_questions(path) == [Question("a", "b", "t"), Question("c")]


@pytest.mark.parametrize("answer", [3, ""])
def test_an_answer_that_is_no_text_is_named(tmp_path: Path, answer: object) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        json.dumps({"prompt": "a"}) + "\n" + json.dumps({"prompt": "b", "answer": answer})
    )

    with pytest.raises(InputError, match=r"p\.jsonl:2: has an 'answer' of .*; write text"):
        read_questions(path)


def test_a_request_is_as_long_as_its_answer() -> None:
    questions = [Question("ab", "cd\n"), Question("x")]

    assert requests_of(TOKENIZER, questions) == [
        Request((1, 97, 98), 3),
        Request((1, 120), MAX_NEW_TOKENS),
    ]
    assert [r.limit for r in requests_of(TOKENIZER, questions, 5)] == [5, 5]


def test_a_prompt_without_tokens_is_named() -> None:
    with pytest.raises(InputError, match="prompt 2 has no tokens; leave it out"):
        requests_of(TOKENIZER, [Question("a"), Question("")])
    assert encode(TOKENIZER, "a", "it") == (1, 97)


def test_the_true_answer_is_forced_without_special_tokens() -> None:
    request = Request((1, 97), 9)

    assert forced_of(TOKENIZER, Question("a", "bc"), request) == Request((1, 97), 2, (98, 99))
    assert answer_ids(TOKENIZER, Question("a")) == ()


@pytest.mark.parametrize(
    ("written", "right"),
    [("cd\n", True), ("cd\nmore", True), ("cd", False), ("ce\n", False), ("", False)],
)
def test_an_answer_is_right_with_its_end(written: str, right: bool) -> None:
    assert is_right(TOKENIZER, Question("ab", "cd\n"), output(written)) is right


def test_the_same_text_in_other_tokens_is_right_too() -> None:
    assert is_right(TOKENIZER, Question("x", "abc"), Output((200, ord("c")), (), ""))
