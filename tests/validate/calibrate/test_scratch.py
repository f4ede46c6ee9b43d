"""Tests of the file that calibration reads from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moetier.traces.errors import InputError
from moetier.validate.calibrate import scratch
from moetier.validate.calibrate.scratch import Pieces, scratch_file
from moetier.validate.machines.direct import aligned
from moetier.validate.machines.slots import SlotPool


@pytest.mark.parametrize("nbytes", [4096, 8192 + 4096, 1 << 20])
def test_the_file_is_as_large_as_asked_and_gone_at_the_end(tmp_path: Path, nbytes: int) -> None:
    with scratch_file(tmp_path, nbytes) as file:
        (folder,) = tmp_path.iterdir()
        assert file.size == file.path.stat().st_size == nbytes
        assert file.path.parent == folder

    assert list(tmp_path.iterdir()) == []


def test_what_is_larger_than_a_piece_is_filled_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hole would be read without the disk."""
    monkeypatch.setattr(scratch, "_PIECE", 1 << 14)
    nbytes = 5 * (1 << 13)
    with scratch_file(tmp_path, nbytes) as file:
        content = file.path.read_bytes()

    assert len(content) == nbytes
    assert all(any(content[at : at + 4096]) for at in range(0, nbytes, 4096))
    assert len(set(content)) > 200  # random bytes


def test_it_is_gone_after_a_failure_too(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), scratch_file(tmp_path, 4096):
        raise KeyboardInterrupt

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [1, 4096, 4097, 10_000])
def test_pieces_lie_on_pages_of_their_own(tmp_path: Path, size: int) -> None:
    with scratch_file(tmp_path, 1 << 16) as file:
        content = file.path.read_bytes()
        pieces, slots = Pieces(file, size), SlotPool(1 << 20)
        assert pieces.nbytes == [size] * ((1 << 16) // aligned(size))
        for at in (0, len(pieces.nbytes) - 1):
            slot = slots.take(size)
            pieces.read(at, slot)
            begin = at * aligned(size)
            assert slot.memory[:size] == content[begin : begin + size]


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(InputError, match="cannot be used"), scratch_file(folder, 4096):
            pass


def test_room_is_asked_for_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = os.statvfs(tmp_path)
    too_much = 2 * free.f_frsize * free.f_blocks
    with pytest.raises(InputError, match=r"are needed, and .* are free"):  # noqa: SIM117
        with scratch_file(tmp_path, too_much):
            pass

    assert list(tmp_path.iterdir()) == []
