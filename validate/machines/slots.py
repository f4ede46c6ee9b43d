"""This module lends out memory for slices: buffers that are used again, up to a limit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from moetier.sim.units import format_bytes
from moetier.traces.errors import InputError
from moetier.validate.machines.direct import aligned, page_memory


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """Memory for one slice: its first *nbytes* bytes count, the rest fills the last page."""

    memory: Any  # mapped pages; on a device a tensor there, (bytes,) uint8
    nbytes: int


class SlotPool:
    """Buffers by size, in whole pages; any thread may take and give back.

    Memory is bounded by *limit* bytes, lent or idle. When it is reached, idle buffers of other
    sizes make room.
    """

    def __init__(self, limit: int) -> None:
        """Begin with nothing.

        Raises:
            InputError: If the machine does not have *limit* bytes of free memory.
        """
        self.limit = limit
        self.held = 0  # bytes, lent or idle
        self.peak = 0
        self._idle: dict[int, list[Any]] = {}
        self._lock = Lock()
        self._check(limit)

    def reserve(self, nbytes: int, count: int) -> None:
        """Make *count* buffers for slices of *nbytes* beforehand, as far as the limit goes."""
        size = max(aligned(nbytes), 1)
        for _ in range(min(count, (self.limit - self.held) // size)):
            self._idle.setdefault(size, []).append(self._new(size))
            self.held += size
        self.peak = max(self.peak, self.held)

    def take(self, nbytes: int) -> Slot:
        """Lend a buffer for *nbytes*.

        Raises:
            InputError: If the limit is reached, or memory has run out.
        """
        size = aligned(nbytes)
        with self._lock:
            idle = self._idle.get(size)
            if idle:
                return Slot(idle.pop(), nbytes)
            self._make_room(size)
            memory = self._new(size)
            self.held += size
            self.peak = max(self.peak, self.held)
            return Slot(memory, nbytes)

    def give(self, slot: Slot) -> None:
        """Take *slot* back; its contents are lost."""
        with self._lock:
            self._idle.setdefault(len(slot.memory), []).append(slot.memory)

    @property
    def lent(self) -> int:
        """Return the bytes that are lent out."""
        with self._lock:
            return self.held - sum(size * len(idle) for size, idle in self._idle.items())

    def close(self) -> None:
        """Let go of all buffers, lent ones too; nobody may use one any more."""
        with self._lock:
            self._idle.clear()

    def _check(self, limit: int) -> None:
        """Raise `InputError` where *limit* bytes cannot be had."""
        require_memory(limit, "slots")

    def _new(self, size: int) -> Any:
        """Return a buffer of *size* bytes, which are whole pages."""
        return page_memory(size)

    def _drop(self, memory: Any) -> None:
        """Let go of a buffer: the system has it back when the last view of it is gone."""

    def _make_room(self, size: int) -> None:
        for other, idle in self._idle.items():
            while idle and self.held + size > self.limit:
                self._drop(idle.pop())
                self.held -= other
        if self.held + size > self.limit:
            raise InputError(
                f"{format_bytes(self.held + size)} are needed for slices, and "
                f"{format_bytes(self.limit)} are set aside",
                where="slots",
                way_out="set more aside, or lower the capacity",
            )


def require_memory(nbytes: int, what: str) -> None:
    """Raise `InputError` if *nbytes* for *what* are more than the memory that is free."""
    free = free_memory()
    if free is not None and nbytes > free:
        raise InputError(
            f"{format_bytes(nbytes)} are needed, and {format_bytes(free)} of memory are free",
            where=what,
            way_out="lower the capacity, or use fewer layers",
        )


def free_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes of memory that can be had without swapping; None where nothing says so.

    A container may be allowed less than the machine has free: then that counts.
    """
    try:
        lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            allowed = _left_to_container(cgroup)
            found = int(line.split()[1]) * 1024
            return found if allowed is None else min(found, allowed)
    return None


def _left_to_container(cgroup: Path) -> int | None:
    """Return the bytes that the control group of this process may still take; None for no limit."""
    try:
        limit = int((cgroup / "memory.max").read_text(encoding="ascii"))
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        rows = (cgroup / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):  # ValueError: the limit is "max"
        return None
    files = [
        int(value)
        for name, _, value in (row.partition(" ") for row in rows)
        if name in ("inactive_file", "active_file")
    ]  # the page cache, which makes room
    return max(limit - used + sum(files), 0)
