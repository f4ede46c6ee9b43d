"""Files are read past the page cache, or by the way out, and what happens to them is noticed."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moetier.traces.errors import InputError
from moetier.validate.machines.direct import PAGE, DirectFile, aligned, page_memory


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "data"
    found.write_bytes(bytes(range(256)) * 16 * 5)  # five pages
    return found


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that does not know O_DIRECT."""
    really = os.open

    def refuse(path: Any, flags: int, *more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return really(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)


@pytest.fixture
def refused_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that takes the flag and then refuses to read."""
    import fcntl

    really = os.preadv

    def refuse(fd: int, *more: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return really(fd, *more)

    monkeypatch.setattr(os, "preadv", refuse)


def read(path: Path, offset: int, nbytes: int) -> tuple[bytes, str]:
    file, memory = DirectFile(path), page_memory(nbytes)
    try:
        file.read(offset, memory, nbytes)
        return memory[:nbytes], file.how
    finally:
        file.close()


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1])
def test_sizes_are_rounded_up_to_pages(nbytes: int) -> None:
    assert aligned(nbytes) == (2 * PAGE if nbytes > PAGE else PAGE)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 100), (PAGE, 2 * PAGE), (4 * PAGE, PAGE)])
def test_reads_what_was_written(path: Path, offset: int, nbytes: int) -> None:
    assert read(path, offset, nbytes)[0] == path.read_bytes()[offset : offset + nbytes]


@pytest.mark.parametrize("how", ["refused", "refused_late"])
def test_where_direct_reads_are_refused_it_reads_otherwise_and_says_so(
    path: Path, how: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(how)
    found, said = read(path, PAGE, 5000)

    assert found == path.read_bytes()[PAGE : PAGE + 5000]
    assert "O_DIRECT was refused" in said


def test_buffered_reads_are_dropped_from_the_cache(
    path: Path, refused: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *what: dropped.append(what))
    read(path, PAGE, 5000)

    assert dropped == [(0, 0, os.POSIX_FADV_DONTNEED), (PAGE, 2 * PAGE, os.POSIX_FADV_DONTNEED)]


def cut(path: Path) -> None:
    os.truncate(path, 2 * PAGE)


def touch(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"other")
    os.utime(path, ns=(1, 1))


def remove(path: Path) -> None:
    path.unlink()


def swap(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (cut, "has 8192 bytes, and had 20480"),
        (touch, "written to"),
        (remove, "removed or replaced"),
        (swap, "removed or replaced"),
    ],
)
def test_harm_while_it_is_open_is_named(
    path: Path, harm: Callable[[Path], None], said: str
) -> None:
    file = DirectFile(path)
    try:
        harm(path)
        with pytest.raises(InputError, match=f"data: .*{said}"):
            file.read(0, page_memory(PAGE), PAGE)
    finally:
        file.close()


def test_a_read_beyond_the_end_is_an_error(path: Path) -> None:
    with pytest.raises(InputError, match="ends before byte 24576"):
        read(path, 4 * PAGE, 2 * PAGE)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none: cannot be read: No such file"):
        DirectFile(tmp_path / "none")


def test_closing_twice_does_nothing(path: Path) -> None:
    file = DirectFile(path)
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.read(0, page_memory(PAGE), PAGE)


def test_memory_that_cannot_be_had_is_an_input_error() -> None:
    with pytest.raises(InputError, match=r"no memory for \d+ bytes"):
        page_memory(1 << 50)
