"""This module stores all slices of a model in one file, each on a page of its own.

    slice 0, padding, slice 1, padding, ... , index, tail

Every slice begins at a multiple of `PAGE`, so that direct reads reach it. The index is JSON; the
tail of `TAIL.size` bytes is its length, its checksum and a mark, so a file that was cut short, or
is not one of these, is known by its end.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from typing import IO

import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from moetier.sim.layout import Layout
from moetier.sim.units import format_bytes
from moetier.traces.errors import InputError
from moetier.traces.files import replacing
from moetier.traces.geometry import Geometry
from moetier.validate.closing import Closing
from moetier.validate.machines.direct import PAGE, DirectFile, aligned, page_memory
from moetier.validate.machines.slots import Slot

TAIL = struct.Struct("<QI4s")  # of the index: length, crc32; mark
MARK = b"MoES"
VERSION = 1

Content = Callable[[int], npt.ArrayLike | bytes]
"""From a slice to its bytes."""

OnProgress = Callable[[int, int], None]  # bytes written, bytes in all


class Index(BaseModel):
    """What a file holds. All lists go by slice."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = VERSION
    geometry: Geometry
    weights: str  # the format of the experts
    content: str  # where the bytes come from, such as "synthetic"
    seed: int | None = None
    n_parts: int
    nbytes: list[int]
    offsets: list[int]  # bytes
    crc32: list[int]
    fingerprint: str  # sha256 of sizes and checksums: of what is stored, wherever it is stored


def write_slices(
    path: str | Path,
    layout: Layout,
    content: Content,
    *,
    geometry: Geometry,
    weights: str,
    source: str,
    seed: int | None = None,
    on_progress: OnProgress | None = None,
) -> Index:
    """Write all slices of *layout* to *path*; the file appears only when it is complete.

    Args:
        path: The file; one that exists is replaced.
        layout: Which slices there are, and their bytes.
        content: Gives the bytes of each, in order.
        geometry: The model.
        weights: The format of the experts.
        source: Where the bytes come from, in a word.
        seed: Of the random numbers, where they are random.
        on_progress: Hears of every slice.

    Raises:
        InputError: If the disk does not have the room, naming the bytes needed; nothing is left.
    """
    target = Path(path)
    offsets, end = [], 0
    for nbytes in layout.nbytes:
        offsets.append(end)
        end += aligned(nbytes)
    with replacing(target) as temporary:
        try:
            free = shutil.disk_usage(target.parent).free
            if free < end:
                raise _full(target, end, free)
            with temporary.open("wb") as file:
                checksums = _write_all(file, layout.nbytes, content, end, on_progress)
                index = Index(
                    geometry=geometry,
                    weights=weights,
                    content=source,
                    seed=seed,
                    n_parts=layout.n_parts,
                    nbytes=layout.nbytes,
                    offsets=offsets,
                    crc32=checksums,
                    fingerprint=_fingerprint(layout.nbytes, checksums),
                )
                text = index.model_dump_json().encode()
                file.write(text + TAIL.pack(len(text), zlib.crc32(text), MARK))
                file.flush()
                os.fsync(file.fileno())  # a page that is not on the disk cannot be read from it
        except OSError as error:  # here, where it is known how many bytes are needed
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _full(target, end, shutil.disk_usage(target.parent).free) from error
            raise InputError(f"cannot be written: {error.strerror}", where=target) from error
    return index


class SlicesFile(Closing):
    """A file of slices, open for reading; use it as a context manager."""

    def __init__(self, path: str | Path) -> None:
        """Open *path*, and compare some of its slices with their checksums.

        Raises:
            InputError: If it is not a file of slices, or is damaged.
        """
        self.path = Path(path)
        self.index = _read_index(self.path)
        self.nbytes = self.index.nbytes
        self._offsets = self.index.offsets
        self.file = DirectFile(self.path)
        try:
            self.verify(sorted({0, len(self.nbytes) // 2, len(self.nbytes) - 1}))
        except InputError:
            self.close()
            raise

    def read(self, slice_id: int, slot: Slot) -> None:
        """Read a slice into *slot*; raises as `DirectFile.read` does."""
        self.file.read(self._offsets[slice_id], slot.memory, self.nbytes[slice_id])

    def read_aside(self, slice_id: int) -> Slot:
        """Return a slice in memory of its own; raises as `DirectFile.read` does."""
        slot = Slot(page_memory(self.nbytes[slice_id]), self.nbytes[slice_id])
        self.read(slice_id, slot)
        return slot

    def verify(self, slices: Iterable[int] | None = None) -> None:
        """Compare *slices*, or all, with their checksums.

        Raises:
            InputError: Naming the first slice that is not what was written.
        """
        chosen = range(len(self.nbytes)) if slices is None else slices
        memory = page_memory(max(self.nbytes))
        for s in chosen:
            slot = Slot(memory, self.nbytes[s])
            self.read(s, slot)
            with memoryview(memory) as view:
                found = zlib.crc32(view[: slot.nbytes])
            if found != self.index.crc32[s]:
                raise InputError(
                    f"slice {s} is not what was written", where=self.path, way_out="pack it again"
                )

    def check_layout(self, layout: Layout) -> None:
        """Raise `InputError` unless the file holds exactly the slices of *layout*."""
        if layout.nbytes != self.nbytes or layout.n_parts != self.index.n_parts:
            raise InputError(
                f"holds {len(self.nbytes)} slices of {format_bytes(sum(self.nbytes))}, and the run "
                f"has {len(layout.nbytes)} of {format_bytes(layout.total_bytes)}",
                where=self.path,
                way_out="pack the slices of this model, format and precision",
            )

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        self.file.close()


def _write_all(
    file: IO[bytes],
    sizes: list[int],
    content: Content,
    total: int,
    on_progress: OnProgress | None,
) -> list[int]:
    """Write the slices one after the other; return the checksum of each."""
    checksums, done = [], 0
    for s, nbytes in enumerate(sizes):
        given = content(s)
        with memoryview(given) as data:  # type: ignore[arg-type]  # arrays are buffers too
            if data.nbytes != nbytes:
                raise ValueError(f"slice {s} has {data.nbytes} bytes, its layout says {nbytes}")
            file.write(data)
            checksums.append(zlib.crc32(data))
        file.write(bytes(aligned(nbytes) - nbytes))
        done += aligned(nbytes)
        if on_progress is not None:
            on_progress(done, total)
    return checksums


def _read_index(path: Path) -> Index:
    """Return the index at the end of *path*; raise `InputError` if it is not whole."""
    damaged = InputError(
        "is not a file of expert slices, or was cut short", where=path, way_out="pack it again"
    )
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL.size))
            tail = file.read()
            if len(tail) != TAIL.size:
                raise damaged
            length, checksum, mark = TAIL.unpack(tail)
            start = size - TAIL.size - length
            if mark != MARK or start < 0:
                raise damaged
            file.seek(start)
            text = file.read(length)
    except OSError as error:
        way_out = "pack the slices first" if error.errno == errno.ENOENT else ""
        raise InputError(
            f"cannot be read: {error.strerror}", where=path, way_out=way_out
        ) from error
    if zlib.crc32(text) != checksum:
        raise damaged
    try:
        index = Index.model_validate_json(text)
    except ValidationError as error:
        raise InputError(
            f"its index is of another version ({error.errors()[0]['msg']})",
            where=path,
            way_out="pack it again",
        ) from error
    ends = [at + aligned(n) for at, n in zip(index.offsets, index.nbytes, strict=True)]
    if start != max(ends) or any(at % PAGE for at in index.offsets):
        raise damaged
    return index


def _fingerprint(sizes: list[int], checksums: list[int]) -> str:
    pairs = ",".join(f"{n}:{c}" for n, c in zip(sizes, checksums, strict=True))
    return sha256(pairs.encode()).hexdigest()


def _full(path: Path, needed: int, free: int) -> InputError:
    return InputError(
        f"the slices take {format_bytes(needed)} ({needed} bytes), and the disk has "
        f"{format_bytes(free)} free",
        where=path,
        way_out="free some, write elsewhere, or pack fewer layers",
    )
