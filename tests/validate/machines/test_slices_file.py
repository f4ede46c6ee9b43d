"""Slices come back as they were written, and a file that is not whole is refused."""

import errno
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetier.sim.layout import Layout
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.validate.machines import slices_file
from moetier.validate.machines.direct import PAGE, page_memory
from moetier.validate.machines.random_weights import random_weights
from moetier.validate.machines.slices_file import SlicesFile, write_slices
from moetier.validate.machines.slots import Slot


def content(slice_id: int) -> bytes:
    return bytes([slice_id + 1]) * [5000, 3000, 10_000][slice_id // 2]


def write(path: Path, layout: Layout, geometry: Geometry, **more: Any) -> slices_file.Index:
    given: Any = {"content": content, "weights": "bf16", "source": "a test"} | more
    return write_slices(path, layout, given.pop("content"), geometry=geometry, **given)


@pytest.fixture
def path(tmp_path: Path, layout: Layout, geometry: Geometry) -> Path:
    found = tmp_path / "x.slices"
    write(found, layout, geometry)
    return found


def test_slices_come_back_in_any_order(path: Path) -> None:
    with SlicesFile(path) as file:
        for s in (5, 0, 3):
            slot = Slot(page_memory(file.nbytes[s]), file.nbytes[s])
            file.read(s, slot)

            assert slot.memory[: slot.nbytes] == content(s)


def test_the_index_says_what_is_where(path: Path, geometry: Geometry) -> None:
    with SlicesFile(path) as file:
        index = file.index

    assert index.nbytes == [5000, 5000, 3000, 3000, 10_000, 10_000]
    assert index.offsets == [n * PAGE for n in (0, 2, 4, 5, 6, 9)]
    assert (index.geometry, index.weights, index.content) == (geometry, "bf16", "a test")


def test_the_fingerprint_is_of_the_contents(
    tmp_path: Path, layout: Layout, geometry: Geometry
) -> None:
    names = [write(tmp_path / name, layout, geometry).fingerprint for name in ("a", "b")]
    other = write(tmp_path / "c", layout, geometry, content=lambda s: content(s)[::-1] or b"")
    changed = write(tmp_path / "d", layout, geometry, content=lambda s: b"x" + content(s)[1:])

    assert names[0] == names[1] == other.fingerprint  # the same byte all through
    assert changed.fingerprint != names[0]


def test_progress_ends_at_all_of_it(tmp_path: Path, layout: Layout, geometry: Geometry) -> None:
    heard: list[tuple[int, int]] = []
    write(tmp_path / "x", layout, geometry, on_progress=lambda *done: heard.append(done))

    assert [done for done, _ in heard] == [n * PAGE for n in (2, 4, 5, 6, 9, 12)]
    assert {total for _, total in heard} == {12 * PAGE}


def test_content_of_another_size_is_refused_and_leaves_nothing(
    tmp_path: Path, layout: Layout, geometry: Geometry
) -> None:
    with pytest.raises(ValueError, match="slice 0 has 3 bytes, its layout says 5000"):
        write(tmp_path / "x", layout, geometry, content=lambda s: b"abc")

    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_known_beforehand(
    tmp_path: Path, layout: Layout, geometry: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=3 * PAGE)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InputError, match=r"take 48 KiB \(49152 bytes\), and the disk has 12 KiB"):
        write(tmp_path / "x", layout, geometry)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "said"), [(errno.ENOSPC, "49152 bytes"), (errno.EIO, "cannot be written")]
)
def test_a_disk_that_fails_midway_leaves_nothing(
    code: int,
    said: str,
    tmp_path: Path,
    layout: Layout,
    geometry: Geometry,
) -> None:
    def fails(slice_id: int) -> bytes:
        if slice_id == 3:
            raise OSError(code, "as the disk says")
        return content(slice_id)

    with pytest.raises(InputError, match=f"x: .*{said}"):
        write(tmp_path / "x", layout, geometry, content=fails)

    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_cut_short_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"x\.slices: is not a file of expert slices"):
        SlicesFile(path)


def test_a_file_without_its_first_part_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes()[PAGE:])
    with pytest.raises(InputError, match="is not a file of expert slices"):
        SlicesFile(path)


@pytest.mark.parametrize("text", [b"", b"short", b"x" * 5000])
def test_any_other_file_is_refused(text: bytes, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(text)
    with pytest.raises(InputError, match="other: is not a file of expert slices"):
        SlicesFile(other)


def test_a_damaged_index_is_refused(path: Path) -> None:
    found = path.read_bytes()
    path.write_bytes(found.replace(b'"weights":"bf16"', b'"weights":"bf61"'))
    with pytest.raises(InputError, match="is not a file of expert slices"):
        SlicesFile(path)


def test_an_index_of_another_kind_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(slices_file.Index):
        more: int

    monkeypatch.setattr(slices_file, "Index", Other)
    with pytest.raises(InputError, match="its index is of another version"):
        SlicesFile(path)


def test_a_missing_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none: cannot be read: .*; pack the slices first"):
        SlicesFile(tmp_path / "none")


def test_damage_is_found_on_opening_or_on_checking_all(path: Path) -> None:
    def flip(at: int) -> None:
        found = bytearray(path.read_bytes())
        found[at] ^= 1
        path.write_bytes(found)

    flip(2 * PAGE)  # slice 1, which opening does not look at
    with SlicesFile(path) as file, pytest.raises(InputError, match="slice 1 is not what was"):
        file.verify()
    flip(0)
    with pytest.raises(InputError, match="slice 0 is not what was written"):
        SlicesFile(path)


def test_another_layout_is_refused(path: Path, layout: Layout) -> None:
    with SlicesFile(path) as file:
        file.check_layout(layout)
        for other in (Layout([[5000], [3000]], 2), Layout([[5000, 5000], [3000, 3000]], 1)):
            with pytest.raises(InputError, match="holds 6 slices of"):
                file.check_layout(other)
        same = Layout([[5000, 5000], [3000, 3000], [10_000, 10_000]], 1)
        with pytest.raises(InputError, match="holds 6 slices of"):
            file.check_layout(same)


@pytest.mark.parametrize(("kind", "dtype", "bits"), [("bf16", "<u2", 16), ("f32", "<u4", 0)])
def test_random_weights_are_small_finite_numbers(kind: str, dtype: str, bits: int) -> None:
    words = random_weights(8 * 4096, kind, 256, 1).view(dtype).astype(np.uint32) << bits
    numbers = words.view(np.float32)

    assert np.isfinite(numbers).all()
    assert 0.5 < 256 * (numbers.astype(np.float64) ** 2).mean() < 2
    assert abs(numbers.mean()) < 0.1 * numbers.std()


@pytest.mark.parametrize("kind", ["bf16", "f32", "q4_0"])
def test_random_weights_depend_on_the_seed_alone(kind: str) -> None:
    one, same, other = (random_weights(1001, kind, 64, 7, at) for at in (1, 1, 2))

    assert len(one) == 1001
    assert one.tobytes() == same.tobytes()
    assert one.tobytes() != other.tobytes()
