"""This module reads decode routing as lines `TOKEN LAYER EXPERT,EXPERT,...`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moetier.traces.batch import DECODE
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.traces.importers import register
from moetier.traces.io import TraceWriter
from moetier.traces.schema import Header, Provenance


@register("one-line")
def import_one_line(source: Path, out: Path, n_experts: int) -> Header:
    """Import lines of a token's number, a layer's number and expert ids, in forward order."""
    rows = []
    for number, line in enumerate(Path(source).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            token, layer, experts = line.split()
            rows.append((int(token), int(layer), [int(e) for e in experts.split(",")]))
        except ValueError:
            raise InputError(
                f"line {number}: '{line}'", where=source, way_out="write `TOKEN LAYER ID,ID`"
            ) from None
    if not rows:
        raise InputError("no lines", where=source, way_out="record it again")
    tokens, layers, experts = zip(*rows, strict=True)
    header = Header(
        geometry=Geometry(
            name=Path(source).stem,
            n_experts=n_experts,
            top_k=len(experts[0]),
            moe_layers=sorted(set(layers)),
        ),
        unknown=["model", "weights", "scores", "prompt", "expert_bytes", "dense_bytes"],
        provenance=Provenance(kind="imported", importer="one-line"),
    )
    with TraceWriter(out, header) as writer:
        writer.add(
            request=0,
            phase=DECODE,
            step=np.array(tokens) - min(tokens),
            position=np.array(tokens),
            moe_layer=np.searchsorted(header.geometry.moe_layers, layers),
            experts=np.array(experts, np.int16),
        )
    return header
