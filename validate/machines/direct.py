"""This module reads a file past the page cache, into memory that begins on a page.

The file is opened with O_DIRECT. Where the file system refuses that, reads are buffered and the
pages they leave behind are dropped from the cache at once; `DirectFile.how` says which it is.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from moetier.traces.errors import InputError

PAGE = 4096
"""What offsets, sizes and addresses of direct reads are multiples of, in bytes."""

_AT_ONCE = 1 << 30  # bytes; Linux moves less than 2 GiB per call


def aligned(nbytes: int) -> int:
    """Return *nbytes* rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def page_memory(nbytes: int) -> mmap.mmap:
    """Return zeroed memory of *nbytes*, rounded up, that begins on a page and is really there.

    Raises:
        InputError: If the system has no more memory.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
    try:
        return mmap.mmap(-1, max(aligned(nbytes), PAGE), flags=flags)
    except OSError as error:
        raise InputError(
            f"no memory for {nbytes} bytes ({error.strerror})", way_out="lower the capacity"
        ) from error


class DirectFile:
    """A file open for reading by any number of threads at once."""

    def __init__(self, path: str | Path) -> None:
        """Open *path*.

        Raises:
            InputError: If it cannot be opened.
        """
        self.path = Path(path)
        try:
            self._fd, self.direct = _open(self.path)
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}", where=self.path) from error
        found = os.fstat(self._fd)
        self.size = found.st_size
        self._changed_at = found.st_mtime_ns

    @property
    def how(self) -> str:
        """Return how the file is read, in words."""
        if self.direct:
            return "O_DIRECT"
        return "buffered reads, each dropped from the page cache (O_DIRECT was refused)"

    def read(self, offset: int, into: mmap.mmap, nbytes: int) -> None:
        """Read *nbytes* bytes from *offset*, both rounded to whole pages, to the start of *into*.

        Raises:
            InputError: If the file has been cut short, changed or removed since it was opened, or
                cannot be read.
        """
        self._check()
        with memoryview(into) as memory:
            at, end = 0, aligned(nbytes)
            try:
                while at < end:
                    got = os.preadv(self._fd, [memory[at : min(end, at + _AT_ONCE)]], offset + at)
                    if got == 0 or (self.direct and got % PAGE):
                        raise self._error(f"ends before byte {offset + end}", "it was cut short")
                    at += got
            except OSError as error:
                raise self._error(f"cannot be read: {error.strerror}", "check the disk") from error
        if not self.direct:
            os.posix_fadvise(self._fd, offset, end, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _check(self) -> None:
        found = os.fstat(self._fd)
        if not found.st_nlink:
            raise self._error("was removed or replaced", "leave it alone during a run")
        if found.st_size != self.size:
            raise self._error(
                f"has {found.st_size} bytes, and had {self.size} when it was opened",
                "leave it alone during a run",
            )
        if found.st_mtime_ns != self._changed_at:
            raise self._error("was written to since it was opened", "leave it alone during a run")

    def _error(self, problem: str, way_out: str) -> InputError:
        return InputError(problem, where=self.path, way_out=way_out)


def _open(path: Path) -> tuple[int, bool]:
    """Return a descriptor of *path*, and whether it reads past the page cache.

    Some file systems take the flag and refuse the first read, so that is tried.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except (OSError, AttributeError):  # no such flag, or refused; a missing file fails again below
        fd = -1
    if fd >= 0:
        try:
            os.preadv(fd, [page_memory(PAGE)], 0)
        except OSError:
            os.close(fd)
        else:
            return fd, True
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return fd, False
