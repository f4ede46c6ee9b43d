"""Check that a store gives back what was written, for the right model, or nothing at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moetier.traces.capture.fingerprint import checksum
from moetier.traces.errors import InputError
from moetier.validate.numerics import store as store_module
from moetier.validate.numerics.store import (
    KEY,
    StoreHeader,
    open_store,
    write_store,
)

HEADER = StoreHeader(
    kind="test", model="tiny", fingerprint="ab" * 32, parameters={"bits": [8, 4], "group": 32}
)


def tensors() -> dict[str, Tensor]:
    whole = torch.arange(24, dtype=torch.int32).view(2, 12)
    return {
        "b.codes": torch.tensor([1, 2, 255], dtype=torch.uint8),
        "a.scales": torch.tensor([[0.5, 2.0]], dtype=torch.float16),
        "c.first": whole[0],  # two views of one memory
        "c.second": whole[1, ::2],
        "d.empty": torch.empty(0, 3),
        "e.bias": torch.tensor([1.5], dtype=torch.bfloat16),
    }


def written(path: Path) -> Path:
    write_store(path / "x.store", tensors(), HEADER)
    return path / "x.store"


def read_all(path: Path) -> dict[str, Tensor]:
    with open_store(path, HEADER.fingerprint, "test") as store:
        return {name: store.tensor(name) for name in store.names}


def test_a_store_gives_back_what_was_written(tmp_path: Path) -> None:
    path = written(tmp_path)
    found = read_all(path)

    assert list(found) == sorted(tensors())
    for name, value in tensors().items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)
    with open_store(path, HEADER.fingerprint, "test") as store:
        assert store.header.parameters == {"bits": [8, 4], "group": 32}
        assert store.header.model == "tiny"


def test_equal_input_makes_equal_bytes(tmp_path: Path) -> None:
    first = written(tmp_path).read_bytes()

    assert written(tmp_path).read_bytes() == first


def test_every_flipped_byte_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    good = path.read_bytes()
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(InputError):
            read_all(path)


def test_a_damaged_tensor_is_named_and_the_others_can_be_read(tmp_path: Path) -> None:
    path = written(tmp_path)
    good = path.read_bytes()
    at = good.rindex(bytes([1, 2, 255]))
    path.write_bytes(good[: at + 1] + b"\3" + good[at + 2 :])
    with open_store(path, HEADER.fingerprint, "test") as store:
        assert torch.equal(store.tensor("a.scales"), tensors()["a.scales"])
        with pytest.raises(InputError, match=r"x\.store: tensor 'b\.codes' is damaged"):
            store.tensor("b.codes")
        with pytest.raises(InputError, match=r"'b\.codes' is damaged"):  # and again
            store.tensor("b.codes")


@pytest.mark.parametrize("end", [0, 4, 100, -1])
def test_a_cut_file_is_refused(tmp_path: Path, end: int) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(InputError, match=r"x\.store: not a store"):
        read_all(path)


def test_another_models_store_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(InputError, match=r"made from tiny \(abababababab\), not .* \(cdcdcd"):
        open_store(path, "cd" * 32, "test")


def test_another_kind_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(InputError, match="is a store of test, not of channels"):
        open_store(path, HEADER.fingerprint, "channels")


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.store"
    write_store(path, tensors(), HEADER.model_copy(update={"version": 2}))
    with pytest.raises(InputError, match="store version 2, this moetier reads 1; build"):
        read_all(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.store"
    with pytest.raises(InputError, match="no such file; build the store first"):
        read_all(path)

    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(InputError, match="no 'moetier' header"):
        read_all(path)

    save_file({"a": torch.ones(1)}, path, metadata={KEY: '{"kind": "test", "bits": 4}'})
    with pytest.raises(InputError, match="header, key 'model': Field required"):
        read_all(path)


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    with (
        open_store(written(tmp_path), HEADER.fingerprint, "test") as store,
        pytest.raises(InputError, match="has no tensor 'z'"),
    ):
        store.tensor("z")


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = open_store(written(tmp_path), HEADER.fingerprint, "test")
    store.close()
    with pytest.raises(ValueError, match=r"is closed; read 'b\.codes' while it is open"):
        store.tensor("b.codes")


def test_a_failed_write_leaves_the_old_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path)
    before = path.read_bytes()

    def full_disk(tensors: object, target: Path, metadata: object) -> None:
        target.write_bytes(b"half a st")
        raise OSError("no space left")

    monkeypatch.setattr(store_module, "save_file", full_disk)
    with pytest.raises(OSError, match="no space left"):
        written(tmp_path)

    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_checksum_covers_type_and_shape() -> None:
    value = torch.zeros(4, dtype=torch.uint8)
    others = (value.view(2, 2), value.view(torch.int8), torch.zeros(5, dtype=torch.uint8))

    assert len({checksum(value), *(checksum(other) for other in others)}) == 4
