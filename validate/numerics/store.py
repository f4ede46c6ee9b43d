"""This module keeps tensors made from a checkpoint in a file, and refuses them for any other one.

A store is a safetensors file. Its header (under `moetier` in the file's metadata) says what kind of
store it is, which model it was made from and with which parameters, and holds a sha256 per tensor
and one over itself. Tensors are read when they are asked for, and checked the first time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moetier.traces.capture.fingerprint import checksum
from moetier.traces.errors import InputError
from moetier.traces.files import replacing
from moetier.validate.closing import Closing

KEY = "moetier"
VERSION = 1
AGAIN = "build the store again"


class StoreHeader(BaseModel):
    """Everything about a store but its tensors; *checksums* and *digest* are for `write_store`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str  # what the tensors are: a reader asks for it by name
    model: str  # name of the model they were made from
    fingerprint: str  # `traces.capture.fingerprint` of it
    parameters: dict[str, Any] = Field(default_factory=dict)  # plain JSON: bits, group, rank, ...
    versions: dict[str, str] = Field(default_factory=dict)
    version: int = VERSION
    checksums: dict[str, str] = Field(default_factory=dict)  # tensor -> sha256
    digest: str = ""  # sha256 of this header without it


class Store(Closing):
    """An open store; use it as a context manager, or `close` it.

    Keeps nothing but the mapped file: a tensor is read again each time it is asked for.
    """

    def __init__(self, path: Path, header: StoreHeader, file: Any) -> None:
        """Wrap an open safetensors *file*; see `open_store`."""
        self.path, self.header = path, header
        self._file: Any = file
        self._checked: set[str] = set()

    def close(self) -> None:
        """Let the file go; tensors read before stay usable."""
        self._file = None

    @property
    def names(self) -> list[str]:
        """Return the tensors' names, sorted."""
        return sorted(self.header.checksums)

    def tensor(self, name: str) -> Tensor:
        """Return the tensor *name* on the CPU.

        Raises:
            InputError: If there is none of that name, or its bytes are not those written.
        """
        if name not in self.header.checksums:
            raise InputError(f"has no tensor '{name}'", where=self.path, way_out=AGAIN)
        if self._file is None:
            raise ValueError(f"{self.path} is closed; read '{name}' while it is open")
        value: Tensor = self._file.get_tensor(name)
        if name not in self._checked:
            if checksum(value) != self.header.checksums[name]:
                raise InputError(
                    f"tensor '{name}' is damaged: its checksum differs",
                    where=self.path,
                    way_out=AGAIN,
                )
            self._checked.add(name)
        return value


def write_store(path: str | Path, tensors: Mapping[str, Tensor], header: StoreHeader) -> None:
    """Write *tensors* and *header* to *path*, whole or not at all; the same input, the same bytes.

    Raises:
        InputError: If *path* cannot be written.
    """
    ready = {name: _own(tensors[name]) for name in sorted(tensors)}
    full = header.model_copy(
        update={
            "checksums": {name: checksum(value) for name, value in ready.items()},
            "versions": {"moetier": version("moetier"), "torch": torch.__version__},
            "digest": "",
        }
    )
    full = full.model_copy(update={"digest": _digest(full)})
    with replacing(path) as temporary:
        save_file(ready, temporary, metadata={KEY: full.model_dump_json()})


def open_store(path: str | Path, fingerprint: str, kind: str) -> Store:
    """Open the store of *kind* that was made from the model with *fingerprint*.

    Raises:
        InputError: If there is no such file, it is damaged, or it is of another kind, version or
            model.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError("no such file", where=path, way_out="build the store first")
    file = _open(path)
    header = _header(path, (file.metadata() or {}).get(KEY))
    if header.kind != kind:
        raise InputError(f"is a store of {header.kind}, not of {kind}", where=path)
    if header.fingerprint != fingerprint:
        raise InputError(
            f"was made from {header.model} ({header.fingerprint[:12]}), "
            f"not from this model ({fingerprint[:12]})",
            where=path,
            way_out="build a store of this model",
        )
    if sorted(file.keys()) != sorted(header.checksums):
        raise InputError("its tensors are not those of its header", where=path, way_out=AGAIN)
    return Store(path, header, file)


def _own(value: Tensor) -> Tensor:
    """Return *value* contiguous, in memory that it shares with no other tensor."""
    plain = value.detach().cpu().contiguous()
    return plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()


def _digest(header: StoreHeader) -> str:
    text = header.model_dump_json(exclude={"digest"})
    return hashlib.sha256(text.encode()).hexdigest()


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InputError(f"not a store: {error}", where=path, way_out=AGAIN) from None


def _header(path: Path, text: str | None) -> StoreHeader:
    if text is None:
        raise InputError(
            "safetensors, but not a store: its metadata has no 'moetier' header", where=path
        )
    try:
        header = StoreHeader.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise InputError(f"header, key '{key}': {first['msg']}", where=path) from None
    if header.version != VERSION:
        raise InputError(
            f"store version {header.version}, this moetier reads {VERSION}",
            where=path,
            way_out=AGAIN,
        )
    if _digest(header) != header.digest:
        raise InputError("its header is damaged: the checksum differs", where=path, way_out=AGAIN)
    return header
