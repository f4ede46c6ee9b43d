"""This module keeps the sketches of a whole model in one checked file, made once per checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from moetier.traces.capture.find import MoeLayer, find_moe_layers
from moetier.traces.capture.fingerprint import fingerprint
from moetier.traces.errors import InputError
from moetier.validate.numerics.channels.experts import ChannelExperts
from moetier.validate.numerics.channels.sketch import ChannelSettings, Sketch, make_sketch
from moetier.validate.numerics.experts import stacked_matrices
from moetier.validate.numerics.store import StoreHeader, open_store, write_store

KIND = "channel sketches"


def store_sketches(
    model: Any,
    path: str | Path,
    settings: ChannelSettings,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Make the sketches of every MoE layer of *model* and write them to *path*.

    *progress* is told (layers done, layers in all) after each. Raises `InputError` as `make_sketch`
    does, and when *path* cannot be written.
    """
    layers = find_moe_layers(model)
    tensors: dict[str, Tensor] = {}
    for where in layers:
        sketch = make_sketch(stacked_matrices(where), settings, where.name)
        tensors |= {f"{where.moe_layer}.{name}": t for name, t in sketch.tensors().items()}
        if progress is not None:
            progress(where.moe_layer + 1, len(layers))
    header = StoreHeader(
        kind=KIND,
        model=type(model).__name__,
        fingerprint=fingerprint(model),
        parameters=settings.as_dict(),
    )
    write_store(path, tensors, header)


def load_sketches(
    model: Any, path: str | Path, settings: ChannelSettings, layers: Sequence[MoeLayer]
) -> list[ChannelExperts]:
    """Return the experts of *layers* of *model* with the sketches stored at *path*.

    Raises:
        InputError: If the file is none, damaged, made from another model or with other settings.
    """
    with open_store(path, fingerprint(model), KIND) as store:
        if store.header.parameters != settings.as_dict():
            raise InputError(
                f"was made with {store.header.parameters}, not with {settings.as_dict()}",
                where=path,
                way_out="build it with these settings",
            )
        names = list(Sketch.__dataclass_fields__)
        return [
            ChannelExperts.build(
                where,
                settings,
                Sketch.of({n: store.tensor(f"{where.moe_layer}.{n}") for n in names}),
            )
            for where in layers
        ]
