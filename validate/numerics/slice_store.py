"""This module slices a whole checkpoint once, keeps the slices in a store, and computes with them.

A store holds the tensors `<MoE layer>.<expert>.msb` and `.lsb`, bytes as `numerics.slices` packs
them. All experts of a model are of one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moetier.traces.capture.describe import model_name
from moetier.traces.capture.find import MoeLayer, find_moe_layers
from moetier.traces.capture.fingerprint import fingerprint
from moetier.traces.errors import InputError
from moetier.validate.numerics.experts import ExpertMatrices, expert_matrices, rewritten
from moetier.validate.numerics.groupwise import GROUP
from moetier.validate.numerics.slices import SlicedExpert, SliceFormat, pack, sliced, unpack
from moetier.validate.numerics.store import Store, StoreHeader, open_store, write_store

KIND = "bit slices"
Progress = Callable[[int, int], None]


class SliceStore:
    """The slices of a model's experts, read as they are asked for."""

    def __init__(self, store: Store) -> None:
        """Read slices from *store*, which `open_slices` opens."""
        self._store = store
        self.format = SliceFormat(**store.header.parameters)

    def expert(self, moe_layer: int, expert: int, *, lsb: bool) -> SlicedExpert:
        """Return an expert's codes: of both slices with *lsb*, else of the MSB slice alone.

        Raises:
            InputError: If a slice is damaged, or the model has no such expert.
        """
        name = f"{moe_layer}.{expert}"
        fine = self._store.tensor(f"{name}.lsb") if lsb else None
        return unpack(self.format, self._store.tensor(f"{name}.msb"), fine)

    def layer(self, where: MoeLayer, *, lsb: bool) -> dict[str, Tensor]:
        """Return the weights of a layer's experts, stacked, by the names of `ExpertMatrices`."""
        experts = [
            self.expert(where.moe_layer, number, lsb=lsb).tensors(self.format.gated)
            for number in range(where.n_experts)
        ]
        return {name: torch.stack([expert[name] for expert in experts]) for name in experts[0]}

    @contextmanager
    def computed(self, layers: Sequence[MoeLayer], *, lsb: bool) -> Iterator[None]:
        """Let *layers* compute with what the slices hold until the block ends; then as before."""

        def from_slices(where: MoeLayer, stack: ExpertMatrices) -> dict[str, Tensor]:
            return self.layer(where, lsb=lsb)

        with rewritten(layers, from_slices):
            yield


def build_slices(
    model: Any,
    path: str | Path,
    high: int,
    low: int,
    group: int = GROUP,
    progress: Progress | None = None,
) -> SliceFormat:
    """Slice every expert of *model* into a store at *path*; *progress* takes (done, in all).

    All slices are in memory before they are written.

    Raises:
        InputError: If bits or group are out of range, a weight is NaN or infinite, the experts have
            several shapes, or *path* cannot be written.
    """
    layers = find_moe_layers(model)
    how = SliceFormat.of(expert_matrices(layers[0])[0], high, low, group)
    total, done = sum(where.n_experts for where in layers), 0
    tensors: dict[str, Tensor] = {}
    for where in layers:
        for number, expert in enumerate(expert_matrices(where)):
            if SliceFormat.of(expert, high, low, group) != how:
                raise InputError(
                    "its experts have another shape than those of the first MoE layer",
                    where=where.name,
                )
            codes = sliced(expert, high, group, f"{where.name}.{number}")
            name = f"{where.moe_layer}.{number}"
            tensors[f"{name}.msb"], tensors[f"{name}.lsb"] = pack(codes, how)
            done += 1
            if progress is not None:
                progress(done, total)
    header = StoreHeader(
        kind=KIND, model=model_name(model), fingerprint=fingerprint(model), parameters=asdict(how)
    )
    write_store(path, tensors, header)
    return how


@contextmanager
def open_slices(path: str | Path, model: Any) -> Iterator[SliceStore]:
    """Open the slices at *path* of *model* until the block ends.

    Raises:
        InputError: If there is no such store, it is damaged, or it was made from another model.
    """
    with open_store(path, fingerprint(model), KIND) as store:
        yield SliceStore(store)
