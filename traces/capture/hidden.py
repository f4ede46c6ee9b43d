"""This module stores what routers read, as safetensors shards in a folder beside a trace.

Where the norm before the router is found, the residual that it read is stored too.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from moetier.traces.errors import InputError

SHARD_BYTES = 64 << 20
RESIDUAL = ".residual"
"""What the name of a residual ends with."""


class HiddenBatch(NamedTuple):
    """What the router of one MoE layer read in one forward pass, its valid tokens in row order."""

    step: int
    moe_layer: int
    hidden: Tensor  # (n_tokens, H)
    residual: Tensor | None = None  # (n_tokens, H) the same before the norm, where it is found


def hidden_folder(trace: str | Path) -> Path:
    """Return the folder that belongs to *trace*."""
    return Path(trace).with_suffix(".hidden")


class HiddenWriter:
    """Writes router inputs; use as a context manager around the writing of the trace.

    The folder appears when the block ends without an error; an error leaves nothing behind.
    """

    def __init__(self, trace: str | Path) -> None:
        """Write beside *trace*; an earlier capture's folder is replaced."""
        self.folder = hidden_folder(trace)
        self.partial = self.folder.with_name(f".{self.folder.name}.partial")
        self._held: dict[str, Tensor] = {}
        self._nbytes = self._shards = 0

    def __enter__(self) -> Self:
        """Start an empty folder under a temporary name."""
        if not self.folder.parent.is_dir():
            raise InputError("its folder does not exist", where=self.folder, way_out="make it")
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir()
        return self

    def add(
        self, step: int, moe_layer: int, hidden: Tensor, residual: Tensor | None = None
    ) -> None:
        """Add *hidden* and *residual* (n_tokens, H), of valid tokens only, in the model's type."""
        for name, value in (("", hidden), (RESIDUAL, residual)):
            if value is not None:
                self._held[f"{step}.{moe_layer}{name}"] = value.detach().to("cpu").contiguous()
                self._nbytes += value.numel() * value.element_size()
        if self._nbytes >= SHARD_BYTES:
            self._flush()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the folder its name, or remove it after an error."""
        if error is not None:
            shutil.rmtree(self.partial, ignore_errors=True)
            return
        self._flush()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.partial.rename(self.folder)

    def _flush(self) -> None:
        if self._held:
            save_file(self._held, self.partial / f"{self._shards:06d}.safetensors")
            self._shards += 1
        self._held, self._nbytes = {}, 0


def read_hidden(trace: str | Path) -> Iterator[HiddenBatch]:
    """Yield what was stored beside *trace*, by step and then MoE layer, in constant memory.

    A batch has the valid rows of the same step and MoE layer of the trace, in their order.
    Raises `InputError` when the trace was captured without.
    """
    folder = hidden_folder(trace)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(
            "no router inputs beside the trace", where=folder, way_out="capture with --hidden"
        )
    for file in files:
        with safe_open(file, framework="pt") as shard:
            names = set(shard.keys())
            inputs = [name for name in names if not name.endswith(RESIDUAL)]
            for step, moe_layer in sorted(tuple(map(int, name.split("."))) for name in inputs):
                name = f"{step}.{moe_layer}"
                beside = f"{name}{RESIDUAL}"
                residual = shard.get_tensor(beside) if beside in names else None
                yield HiddenBatch(step, moe_layer, shard.get_tensor(name), residual)


def valid_rows(hidden: Tensor, valid: Tensor) -> Tensor:
    """Return the rows of *hidden* (T, H) where *valid* (T,) is set."""
    return hidden[torch.as_tensor(valid, device=hidden.device)]
