"""This module is a file of random bytes to read from, in pieces of any size."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from moetier.sim.units import format_bytes
from moetier.traces.errors import InputError
from moetier.validate.machines.direct import DirectFile, aligned
from moetier.validate.machines.slots import Slot

_PIECE = 1 << 24


class Pieces:
    """A file as pieces of one size, for lanes to read."""

    def __init__(self, file: DirectFile, nbytes: int) -> None:
        """Cut *file* into pieces of *nbytes*, each on pages of its own."""
        self._file, self._step = file, aligned(nbytes)
        self.nbytes: Sequence[int] = [nbytes] * (file.size // self._step)

    def read(self, slice_id: int, slot: Slot) -> None:
        """Read a piece into *slot*."""
        self._file.read(slice_id * self._step, slot.memory, slot.nbytes)


@contextmanager
def scratch_file(folder: Path, nbytes: int) -> Iterator[DirectFile]:
    """Yield a file of *nbytes* random bytes in *folder*, open; it is gone at the end.

    Raises:
        InputError: If *folder* cannot be written to, or has no room.
    """
    try:
        free = shutil.disk_usage(folder).free
        if free < nbytes:
            raise InputError(
                f"{format_bytes(nbytes)} are needed, and {format_bytes(free)} are free",
                where=folder,
                way_out="free some, or give another --folder",
            )
        with TemporaryDirectory(prefix=".moetier-calibrate-", dir=folder) as inside:
            path = Path(inside) / "bytes"
            piece = np.random.default_rng(0).bytes(min(_PIECE, nbytes))
            with path.open("wb") as out:
                for at in range(0, nbytes, _PIECE):
                    out.write(piece[: nbytes - at])
                out.flush()
                os.fsync(out.fileno())
            file = DirectFile(path)
            try:
                yield file
            finally:
                file.close()
    except OSError as error:
        raise InputError(f"cannot be used: {error.strerror}", where=folder) from error
