"""Slots are used again, stay below their limit, and say what they lack."""

from pathlib import Path

import pytest

from moetier.traces.errors import InputError
from moetier.validate.machines import slots
from moetier.validate.machines.direct import PAGE
from moetier.validate.machines.slots import SlotPool, free_memory, require_memory


def test_a_buffer_that_came_back_is_lent_again() -> None:
    pool = SlotPool(4 * PAGE)
    first = pool.take(100)
    memory = first.memory
    pool.give(first)
    again = pool.take(PAGE)

    assert again.memory is memory
    assert again.nbytes == PAGE
    assert (pool.held, pool.lent) == (PAGE, PAGE)


def test_what_is_lent_is_distinct() -> None:
    pool = SlotPool(4 * PAGE)
    one, two = pool.take(PAGE), pool.take(PAGE)
    one.memory[:3], two.memory[:3] = b"one", b"two"

    assert one.memory[:3] + two.memory[:3] == b"onetwo"


def test_the_limit_holds_and_the_bytes_needed_are_named() -> None:
    pool = SlotPool(2 * PAGE)
    pool.take(PAGE)
    with pytest.raises(InputError, match="slots: 12 KiB are needed for slices, and 8 KiB are set"):
        pool.take(PAGE + 1)


def test_idle_buffers_of_other_sizes_make_room() -> None:
    pool = SlotPool(3 * PAGE)
    pool.give(pool.take(PAGE))
    pool.give(pool.take(2 * PAGE))
    kept = pool.take(3 * PAGE)

    assert len(kept.memory) == 3 * PAGE
    assert pool.held == pool.peak == 3 * PAGE


def test_what_is_reserved_stays_within_the_limit_and_is_what_is_lent() -> None:
    pool = SlotPool(5 * PAGE)
    pool.reserve(2 * PAGE, 10)

    assert (pool.held, pool.lent) == (4 * PAGE, 0)

    pool.take(2 * PAGE)

    assert (pool.held, pool.lent) == (4 * PAGE, 2 * PAGE)


def test_a_limit_above_the_free_memory_is_refused_before_anything_is_taken() -> None:
    with pytest.raises(InputError, match=r"slots: .* are needed, and .* of memory are free"):
        SlotPool(1 << 50)


def test_free_memory_is_what_the_system_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   3 kB\n")

    assert free_memory(tmp_path, tmp_path) == 3072

    monkeypatch.setattr(slots, "free_memory", lambda: 3072)
    require_memory(3072, "all of it")
    with pytest.raises(InputError, match="more: 4 KiB are needed, and 3 KiB"):
        require_memory(4096, "more")


@pytest.mark.parametrize("text", [None, "MemTotal: 9 kB\n"])
def test_a_system_that_does_not_say_refuses_nothing(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "meminfo").write_text(text)

    assert free_memory(tmp_path, tmp_path) is None

    monkeypatch.setattr(slots, "free_memory", lambda: None)
    require_memory(1 << 60, "anything")


@pytest.mark.parametrize(
    ("limit", "used", "free"),
    [
        ("2000000", "1500000", 500_000 + 300),  # the page cache of the container makes room
        ("max", "1500000", 3_072_000),
        ("9000000", "1500000", 3_072_000),  # more than the machine has
        ("2000000", "2500000", 0),
    ],
)
def test_a_container_may_be_allowed_less(limit: str, used: str, free: int, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 3000 kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text("anon 7\ninactive_file 100\nactive_file 200\nslab 9\n")

    assert free_memory(tmp_path, tmp_path) == free
