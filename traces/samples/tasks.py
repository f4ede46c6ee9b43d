"""This module makes moe-tiny's tasks: short character prompts, each with one exact answer.

An item reads ``name question=answer``. Whether it may be trained on follows from a hash of its
prompt alone, so that training and test items are disjoint whatever the seeds. Two tasks are
finite tables, learnt by heart: all of their prompts are in both splits, and they say so.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "test"]

LETTERS = "abcdefghijklmnopqrstuvwxyz"
END = "\n"
"""What ends an answer, and so separates items that follow each other."""

ALPHABET = END + " " + "0123456789" + LETTERS + "=,:-"
"""Every character that a prompt or an answer may hold."""

TEST_SHARE = 10
"""One prompt in this many is a test prompt."""

MAX_FACTOR = 12
_SYMBOLS = (
    "h he li be b c n o f ne na mg al si p s cl ar k ca sc ti v cr mn fe co ni cu zn ga ge as se "
    "br kr rb sr y zr nb mo tc ru rh pd ag cd in sn sb te i xe cs ba la ce pr nd pm sm eu gd tb "
    "dy ho er tm yb lu hf ta w re os ir pt au hg tl pb bi po at rn fr ra ac th pa u np pu am cm "
    "bk cf es fm md no lr rf db sg bh hs mt ds rg cn nh fl mc lv ts og"
)
ELEMENTS = tuple(_SYMBOLS.split())
"""The symbols of the chemical elements in the order of their atomic numbers, from 1."""


@dataclass(frozen=True, slots=True)
class Item:
    """One question: the model is given *prompt* and must write *answer*, then `END`."""

    task: str
    prompt: str
    answer: str
    finite: bool

    @property
    def text(self) -> str:
        """The item as the model is trained on it."""
        return self.prompt + self.answer + END


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of question; *draw* makes one ``(question, answer)`` pair.

    A *finite* task has a table of all its pairs instead of a held-out split.
    """

    name: str
    draw: Callable[[random.Random], tuple[str, str]]
    finite: bool = False
    table: tuple[tuple[str, str], ...] = ()

    def item(self, question: str, answer: str) -> Item:
        """Dress a pair as an item of this task."""
        return Item(self.name, f"{self.name} {question}=", answer, self.finite)

    def items(self, rng: random.Random, split: Split) -> Iterator[Item]:
        """Yield items of *split* for ever, with repeats."""
        while True:
            item = self.item(*self.draw(rng))
            if self.finite or split_of(item.prompt) == split:
                yield item


def split_of(prompt: str) -> Split:
    """Return the split of a prompt that belongs to no finite table."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % TEST_SHARE == 0 else "train"


def _word(rng: random.Random, shortest: int, longest: int, letters: str = LETTERS) -> str:
    return "".join(rng.choices(letters, k=rng.randint(shortest, longest)))


def _add(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randrange(100), rng.randrange(100)
    return f"{a},{b}", str(a + b)


def _sub(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randrange(100), rng.randrange(100)
    return f"{a},{b}", str(a - b)


def _max(rng: random.Random) -> tuple[str, str]:
    numbers = [rng.randrange(10, 100) for _ in range(3)]
    return ",".join(map(str, numbers)), str(max(numbers))


def _copy(rng: random.Random) -> tuple[str, str]:
    word = _word(rng, 3, 8)
    return word, word


def _reverse(rng: random.Random) -> tuple[str, str]:
    word = _word(rng, 3, 7)
    return word, word[::-1]


def _sort(rng: random.Random) -> tuple[str, str]:
    word = _word(rng, 3, 6)
    return word, "".join(sorted(word))


def _next(rng: random.Random) -> tuple[str, str]:
    word = _word(rng, 3, 6)
    return word, "".join(LETTERS[(LETTERS.index(letter) + 1) % 26] for letter in word)


def _count(rng: random.Random) -> tuple[str, str]:
    word = _word(rng, 4, 9, "abc")
    letter = rng.choice("abc")
    return f"{letter}:{word}", str(word.count(letter))


def _look(rng: random.Random) -> tuple[str, str]:
    keys = rng.sample(LETTERS, rng.randint(2, 4))
    values = [rng.choice("0123456789") for _ in keys]
    wanted = rng.randrange(len(keys))
    pairs = "".join(key + value for key, value in zip(keys, values, strict=True))
    return f"{pairs},{keys[wanted]}", values[wanted]


def _finite(name: str, table: Sequence[tuple[str, str]]) -> Task:
    pairs = tuple(table)
    return Task(name, lambda rng: rng.choice(pairs), finite=True, table=pairs)


_FACTORS = range(MAX_FACTOR + 1)

TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task("add", _add),
        Task("sub", _sub),
        Task("max", _max),
        Task("copy", _copy),
        Task("rev", _reverse),
        Task("sort", _sort),
        Task("next", _next),
        Task("count", _count),
        Task("look", _look),
        _finite("mul", [(f"{a},{b}", str(a * b)) for a in _FACTORS for b in _FACTORS]),
        _finite("elem", [(symbol, str(n)) for n, symbol in enumerate(ELEMENTS, start=1)]),
    )
}
"""Every task by its name."""


def training_items(seed: int, weights: Mapping[str, float] | None = None) -> Iterator[Item]:
    """Yield training items for ever, tasks mixed in proportion to *weights* (default: equally)."""
    rng = random.Random(seed)
    shares = dict.fromkeys(TASKS, 1.0) if weights is None else dict(weights)
    sources = {name: TASKS[name].items(rng, "train") for name in shares}
    names, cumulative = list(shares), list(shares.values())
    while True:
        yield next(sources[rng.choices(names, weights=cumulative)[0]])


def held_out_items(per_task: int, seed: int = 0) -> list[Item]:
    """Return *per_task* distinct test items of every task, in the order of `TASKS`.

    Raises:
        ValueError: If a finite table is smaller than *per_task*.
    """
    chosen: list[Item] = []
    for task in TASKS.values():
        rng = random.Random(f"{seed}/{task.name}")
        if task.finite:
            if per_task > len(task.table):
                raise ValueError(
                    f"{per_task} items asked of {task.name}, whose table has {len(task.table)}; "
                    f"ask for at most {most_held_out()} per task"
                )
            chosen += [task.item(*pair) for pair in rng.sample(task.table, per_task)]
            continue
        distinct: dict[str, Item] = {}
        for item in task.items(rng, "test"):
            if len(distinct) == per_task:
                break
            distinct[item.prompt] = item
        chosen += distinct.values()
    return chosen


def most_held_out() -> int:
    """Return the most items per task that `held_out_items` can give: the smallest finite table."""
    return min(len(task.table) for task in TASKS.values() if task.finite)
