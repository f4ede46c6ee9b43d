"""This module writes a file whole or not at all, and knows what a crash left half written."""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moetier.traces.errors import InputError


class DiskFullError(InputError):
    """A disk that is full, which says nothing of the input: the same may go well later."""


_HOST = platform.node().replace(".", "-")


def is_abandoned(temporary: Path) -> bool:
    """Return whether the process that `replacing` gave *temporary* to is no more.

    Of another machine's processes nothing is known, so theirs never are.
    """
    *_, host, pid, _ = ["", "", "", *temporary.name.split(".")]
    if host != _HOST or not pid.isdigit() or not Path("/proc/self").exists():
        return False
    return not Path(f"/proc/{pid}").exists()


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary name beside *path*; on success it becomes *path*, on an error it goes.

    Raises:
        InputError: If *path* is a directory, its directory does not exist or is not writable, or
            the disk is full (`DiskFullError`).
    """
    target = Path(path)
    if target.is_dir():
        raise InputError("is a directory", where=target, way_out="give a file name")
    if not target.parent.is_dir():
        raise InputError(
            f"directory '{target.parent}' does not exist", where=target, way_out="create it first"
        )
    if not os.access(target.parent, os.W_OK):
        raise InputError(
            f"directory '{target.parent}' is not writable", where=target, way_out="write elsewhere"
        )
    temporary = target.parent / f".{target.name}.{_HOST}.{os.getpid()}.tmp"
    try:
        yield temporary
        temporary.replace(target)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFullError(
            f"cannot be written: {error.strerror}",
            where=target,
            way_out="make room, and run the same again",
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
