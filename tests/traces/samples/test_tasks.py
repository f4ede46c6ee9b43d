"""Check moe-tiny's tasks: right answers, disjoint splits, and nothing that depends on the run."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import pytest

from moetier.traces.samples.tasks import (
    ALPHABET,
    ELEMENTS,
    END,
    MAX_FACTOR,
    TASKS,
    Item,
    held_out_items,
    most_held_out,
    split_of,
    training_items,
)


def first_training(n: int, seed: int = 0) -> list[Item]:
    return list(itertools.islice(training_items(seed), n))


def solve_look(question: str) -> str:
    pairs, wanted = question.split(",")
    return dict(zip(pairs[::2], pairs[1::2], strict=True))[wanted]


def solve_count(question: str) -> str:
    letter, word = question.split(":")
    return str(sum(other == letter for other in word))


def numbers(question: str) -> list[int]:
    return [int(number) for number in question.split(",")]


SOLVERS: dict[str, Callable[[str], str]] = {
    "add": lambda q: str(sum(numbers(q))),
    "sub": lambda q: str(numbers(q)[0] - numbers(q)[1]),
    "max": lambda q: str(sorted(numbers(q))[-1]),
    "copy": lambda q: q,
    "rev": lambda q: "".join(reversed(q)),
    "sort": lambda q: "".join(sorted(q)),
    "next": lambda q: "".join(chr(ord("a") + (ord(letter) - ord("a") + 1) % 26) for letter in q),
    "count": solve_count,
    "look": solve_look,
    "mul": lambda q: str(numbers(q)[0] * numbers(q)[1]),
    "elem": lambda q: str(ELEMENTS.index(q) + 1),
}


def test_every_task_has_a_solver_here() -> None:
    assert list(SOLVERS) == list(TASKS)


@pytest.mark.parametrize("name", TASKS)
def test_answers_are_right(name: str) -> None:
    items = TASKS[name].items(random.Random(3), "train")
    for item in itertools.islice(items, 300):
        prefix, question = item.prompt.removesuffix("=").split(" ")

        assert prefix == name
        assert item.answer == SOLVERS[name](question)


@pytest.mark.parametrize(
    ("symbol", "number"), [("h", 1), ("fe", 26), ("ag", 47), ("au", 79), ("u", 92), ("og", 118)]
)
def test_elements_are_numbered(symbol: str, number: int) -> None:
    assert ELEMENTS[number - 1] == symbol


def test_elements_are_distinct() -> None:
    assert len(set(ELEMENTS)) == 118


def test_an_item_reads_prompt_answer_end() -> None:
    item = TASKS["add"].item("1,2", "3")

    assert item == Item(task="add", prompt="add 1,2=", answer="3", finite=False)
    assert item.text == "add 1,2=3" + END


def test_all_characters_are_in_the_alphabet() -> None:
    used = set("".join(item.text for item in first_training(3000)))

    assert used <= set(ALPHABET)
    assert len(ALPHABET) == len(set(ALPHABET))


def test_the_generator_is_deterministic() -> None:
    assert first_training(200, seed=5) == first_training(200, seed=5)
    assert first_training(200, seed=5) != first_training(200, seed=6)
    assert held_out_items(20, seed=5) == held_out_items(20, seed=5)
    assert held_out_items(20, seed=5) != held_out_items(20, seed=6)


@pytest.mark.slow
def test_items_are_the_same_in_another_process() -> None:
    code = (
        "from moetier.traces.samples.tasks import held_out_items, training_items\n"
        "stream = training_items(1)\n"
        "print([next(stream).text for _ in range(50)], [i.text for i in held_out_items(5, 2)])"
    )
    environment = {"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    here = ([item.text for item in first_training(50, 1)], [i.text for i in held_out_items(5, 2)])

    assert done.stdout == f"{here[0]} {here[1]}\n"


def test_splits_are_disjoint_by_hash() -> None:
    trained = [item for item in first_training(20_000) if not item.finite]
    held_out = [item for item in held_out_items(100) if not item.finite]

    assert {split_of(item.prompt) for item in trained} == {"train"}
    assert {split_of(item.prompt) for item in held_out} == {"test"}
    assert {item.prompt for item in trained}.isdisjoint(item.prompt for item in held_out)


def test_a_tenth_of_the_prompts_is_held_out() -> None:
    share = sum(split_of(f"add {n},{n}=") == "test" for n in range(20_000)) / 20_000

    assert share == pytest.approx(0.1, abs=0.01)


def test_the_split_does_not_change() -> None:
    """A change of the hash would let a trained checkpoint be tested on what it saw."""
    held_out = [n for n in range(100) if split_of(f"add {n},{n}=") == "test"]

    assert held_out == [15, 40, 41, 54, 57, 60, 62, 79, 97, 98]


def test_finite_tasks_say_so() -> None:
    finite = {name for name, task in TASKS.items() if task.finite}

    assert finite == {"mul", "elem"}
    assert {item.task for item in first_training(2000) if item.finite} == finite
    assert {item.task for item in held_out_items(10) if item.finite} == finite
    assert len(TASKS["mul"].table) == (MAX_FACTOR + 1) ** 2
    assert len(TASKS["elem"].table) == len(ELEMENTS)


def test_only_finite_tasks_have_a_table() -> None:
    assert all(bool(task.table) == task.finite for task in TASKS.values())


def test_held_out_items_are_distinct_and_even() -> None:
    items = held_out_items(most_held_out())

    assert Counter(item.task for item in items) == dict.fromkeys(TASKS, most_held_out())
    assert len({item.prompt for item in items}) == len(items)
    assert len(items) >= 1000


def test_more_items_than_a_table_has_are_refused() -> None:
    with pytest.raises(ValueError, match=r"119 items asked of elem, whose table has 118"):
        held_out_items(119)


def test_tasks_are_mixed_by_weight() -> None:
    stream = training_items(0, {"add": 3.0, "copy": 1.0, "sub": 0.0})
    counts = Counter(next(stream).task for _ in range(4000))

    assert set(counts) == {"add", "copy"}
    assert counts["add"] / counts["copy"] == pytest.approx(3, rel=0.1)
