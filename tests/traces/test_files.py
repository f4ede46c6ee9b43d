"""Tests of files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from moetier.traces.errors import InputError
from moetier.traces.files import replacing


def test_a_file_appears_only_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "out.txt"
    with replacing(target) as temporary:
        temporary.write_text("new")
        seen_inside = target.exists()

    assert not seen_inside
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_an_error_keeps_the_old_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "out.txt"
    target.write_text("old")

    def stop_half_way() -> None:
        with replacing(target) as temporary:
            temporary.write_text("ne")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        stop_half_way()

    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a directory; give a file name"), replacing(tmp_path):
        pass


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    target = tmp_path / "none" / "out.txt"
    with pytest.raises(InputError, match="none' does not exist; create it"), replacing(target):
        pass


def test_a_directory_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(InputError, match="is not writable"), replacing(tmp_path / "out.txt"):
        pass


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_and_leaves_what_was_there(code: int, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("before")

    def write() -> None:
        with replacing(tmp_path / "x") as temporary:
            temporary.write_text("half")
            raise OSError(code, os.strerror(code))

    with pytest.raises(InputError, match=r"x: cannot be written: .*; make room, and run"):
        write()

    assert (tmp_path / "x").read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_other_errors_of_the_system_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError), replacing(tmp_path / "x"):
        raise FileExistsError(errno.EEXIST, "there")
