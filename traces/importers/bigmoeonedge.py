"""This module reads BigMoeOnEdge's `route_trace v1`: a CSV, one row per routed expert.

The `#` preamble gives the model and the bytes of each layer. `step` is the position in the
context, so the rows of one prefill share turn and phase. Columns are found by name, as the format
may grow. In the last layer a prefill routes only its last token: llama.cpp computes no more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from moetier.traces.batch import PREFILL
from moetier.traces.columns import PAD, Columns, Ints, build
from moetier.traces.errors import InputError
from moetier.traces.importers import register
from moetier.traces.importers._csv import Table, join, read_tables
from moetier.traces.importers._names import fit_geometry, split_model_name
from moetier.traces.io import TraceWriter
from moetier.traces.schema import Header, Provenance

NEEDED = {"turn": int, "phase": int, "step": int, "layer": int, "slot": int, "expert": int}
OPTIONAL = {"weight": float, "residency": int, "dropped": int}

_FIRST = "# route_trace v"
_MODEL = re.compile(r"# model=(.*) arch=\S* n_layer=(\d+) n_expert=(\d+) n_expert_used=(\d+)\s*$")
_LAYER = re.compile(r"# layer=(\d+) expert_bytes=(\d+) dense_bytes=(\d+)\s*$")
_MOST = np.iinfo(np.int32).max


@register("bigmoeonedge")
def import_bigmoeonedge(source: Path, out: Path, model: str | None = None) -> Header:
    """Import a `route_trace v1` CSV of BigMoeOnEdge.

    A turn becomes a request; its prefill is one forward step, each decoded token another. *model*
    names a published geometry where the model name in the file does not lead to one.

    Raises:
        InputError: If the file is not such a trace; names the line, the value and the way out.
    """
    source = Path(source)
    preamble = _read_preamble(source)
    survey = _survey(source, preamble)
    header = _header(source, preamble, survey, model)
    tables = read_tables(source, NEEDED, OPTIONAL, whole=not survey.ordered)
    with TraceWriter(out, header) as writer:
        n_steps = 0
        for table in _whole_steps(tables):
            rows, n_steps = _rows(source, table, header, n_steps)
            writer.add_columns(rows)
    return header


@dataclass
class _Preamble:
    model: str
    n_layers: int
    n_experts: int
    top_k: int
    expert_bytes: dict[int, int] = field(default_factory=dict)  # of layers with experts
    dense_bytes: dict[int, int] = field(default_factory=dict)  # of all layers


@dataclass
class _Survey:
    layers: list[int]
    weights: bool  # is at least one weight known?
    residency: bool
    ordered: bool  # does the file go through the forward steps one by one?


def _read_preamble(source: Path) -> _Preamble:
    if not source.is_file():
        raise InputError("no such file", where=source, way_out="name a route_trace CSV")
    with source.open(encoding="utf-8", errors="replace") as file:
        first = file.readline()
        if not first.startswith(_FIRST):
            raise InputError(
                f"line 1: expected '{_FIRST}1', got {first[:40].strip()!r}",
                where=source,
                way_out="is it a route_trace of BigMoeOnEdge?",
            )
        if first.strip() != f"{_FIRST}1":
            raise InputError(
                f"line 1: version {first.removeprefix(_FIRST).strip()!r} is not known",
                where=source,
                way_out="this importer reads v1",
            )
        preamble: _Preamble | None = None
        for number, line in enumerate(islice(file, 100_000), start=2):
            if not line.startswith("#"):
                break
            if preamble is None and (found := _MODEL.match(line)):
                preamble = _Preamble(found[1], int(found[2]), int(found[3]), int(found[4]))
            elif preamble is not None and (found := _LAYER.match(line)):
                layer, expert, dense = (int(text) for text in found.groups())
                preamble.dense_bytes[layer] = dense
                if expert:
                    preamble.expert_bytes[layer] = expert
            elif "=" in line:
                raise InputError(
                    f"line {number}: cannot read {line.strip()!r}",
                    where=source,
                    way_out="expected '# model=... arch=... n_layer=... n_expert=... "
                    "n_expert_used=...', then '# layer=... expert_bytes=... dense_bytes=...'",
                )
    if preamble is None:
        raise InputError("no '# model=...' line", where=source, way_out="record it again")
    return preamble


def _survey(source: Path, preamble: _Preamble) -> _Survey:
    """Check every row and learn what the header has to say."""
    layers: set[int] = set()
    weights, residency, ordered, last = False, False, True, -1
    for table in read_tables(source, NEEDED, OPTIONAL):
        _check(source, table, preamble)
        layers.update(np.unique(table.columns["layer"]).tolist())
        weight = table.columns.get("weight")
        weights = weights or (weight is not None and not np.isnan(weight).all())
        residency = "residency" in table.columns
        key = _keys(table)
        ordered = ordered and int(key[0]) >= last and bool((np.diff(key) >= 0).all())
        last = int(key[-1])
    if not layers:
        raise InputError("no rows after the preamble", where=source, way_out="record it again")
    return _Survey(sorted(preamble.expert_bytes or layers), weights, residency, ordered)


def _check(source: Path, table: Table, preamble: _Preamble) -> None:
    limits = {
        "turn": (0, _MOST),
        "phase": (0, 1),
        "step": (0, _MOST),
        "layer": (0, preamble.n_layers - 1),
        "slot": (0, preamble.top_k - 1),
        "expert": (0, preamble.n_experts - 1),
        "residency": (0, 2),
        "dropped": (0, 1),
    }
    for name, (low, high) in limits.items():
        values = table.columns.get(name)
        if values is not None:
            _refuse(source, table, name, (values < low) | (values > high), f"{low} to {high}")
    if preamble.expert_bytes:
        layer = table.columns["layer"]
        wrong = ~np.isin(layer, list(preamble.expert_bytes))
        _refuse(source, table, "layer", wrong, "a layer with expert_bytes in the preamble")
    weight = table.columns.get("weight")
    if weight is not None:
        _refuse(source, table, "weight", np.isinf(weight), "a finite weight or nan")


def _refuse(source: Path, table: Table, name: str, wrong: Any, expected: str) -> None:
    if wrong.any():
        row = int(np.argmax(wrong))
        raise InputError(
            f"line {table.lines[row]}, column '{name}': {table.columns[name][row]}",
            where=source,
            way_out=f"expected {expected}",
        )


def _header(source: Path, preamble: _Preamble, survey: _Survey, model: str | None) -> Header:
    name, weights = split_model_name(preamble.model)
    geometry, unknown = fit_geometry(
        name,
        model,
        n_experts=preamble.n_experts,
        top_k=preamble.top_k,
        moe_layers=survey.layers,
        n_layers=preamble.n_layers,
        where=str(source),
    )
    stored = weights or "recorded"
    recorded = bool(preamble.expert_bytes)
    dense = [preamble.dense_bytes.get(layer, 0) for layer in survey.layers]
    others = [preamble.dense_bytes.get(i) for i in range(preamble.n_layers)]
    other = [n for i, n in enumerate(others) if n is not None and i not in survey.layers]
    unknown += ["scores"]
    unknown += [] if survey.weights else ["weights"]
    unknown += [] if recorded else ["expert_bytes"]
    unknown += [] if any(dense) else ["dense_bytes"]
    return Header(
        geometry=geometry,
        weights=stored if recorded else weights,
        expert_bytes={stored: [preamble.expert_bytes[i] for i in survey.layers]}
        if recorded
        else {},
        dense_bytes=dense if any(dense) else None,
        dense_layer_bytes=other or None,
        recorded_residency=survey.residency,
        unknown=unknown,
        provenance=Provenance(
            kind="imported",
            model=name,
            dtype=weights,
            importer="bigmoeonedge",
            note="route_trace v1",
        ),
    )


def _keys(table: Table) -> Ints:
    """Return a number for the forward step of each row, ascending in time."""
    turn, phase, step = (table.columns[name] for name in ("turn", "phase", "step"))
    keys: Ints = ((turn * 2 + phase) << 31) | np.where(phase == PREFILL, 0, step)
    return keys


def _whole_steps(tables: Iterator[Table]) -> Iterator[Table]:
    """Yield tables that hold whole forward steps only."""
    held: list[Table] = []
    for table in tables:
        keys = _keys(table)
        if (np.diff(keys) < 0).any():  # only in a file that was read whole
            order = np.argsort(keys, kind="stable")
            table, keys = table.take(order), keys[order]
        cut = int(np.searchsorted(keys, keys[-1]))
        if held and _keys(held[-1])[-1] != keys[0]:
            yield join(held)
            held = []
        if cut:
            yield join([*held, table.take(slice(0, cut))])
            held = []
        held.append(table.take(slice(cut, None)))
    if held:
        yield join(held)


def _rows(source: Path, table: Table, header: Header, n_steps: int) -> tuple[Columns, int]:
    """Return the rows of *table* and the number of forward steps so far."""
    geometry = header.geometry
    column = table.columns
    key = _keys(table)
    moe_layer = np.searchsorted(geometry.moe_layers, column["layer"])
    order = np.lexsort((column["slot"], column["step"], moe_layer, key))
    table, key, moe_layer = table.take(order), key[order], moe_layer[order]
    column = table.columns
    step, slot = column["step"], column["slot"]
    new_step = np.concatenate([[True], np.diff(key) != 0])
    new_cell = new_step | np.concatenate([[True], (np.diff(moe_layer) != 0) | (np.diff(step) != 0)])
    same_slot = ~new_cell & np.concatenate([[False], np.diff(slot) == 0])
    _refuse(source, table, "slot", same_slot, "each slot once per token and layer")
    cell = np.cumsum(new_cell) - 1
    shape = (int(cell[-1]) + 1, geometry.top_k)
    dropped = column.get("dropped", np.zeros(len(table), np.int64)) == 1

    experts = np.full(shape, PAD, np.int16)
    experts[cell, slot] = np.where(dropped, PAD, column["expert"])
    weights = recorded = None
    if "weight" in column:
        weights = np.zeros(shape, np.float32)
        weights[cell, slot] = np.where(dropped, 0, column["weight"])
        weights[np.isnan(weights).any(axis=1)] = np.nan
    if "residency" in column:
        recorded = np.full(shape, PAD, np.int8)
        recorded[cell, slot] = np.where(dropped, PAD, column["residency"])
    rows = build(
        header,
        request=column["turn"][new_cell],
        phase=column["phase"][new_cell],
        step=n_steps + (np.cumsum(new_step) - 1)[new_cell],
        position=step[new_cell],
        moe_layer=moe_layer[new_cell],
        experts=experts,
        weights=weights,
        recorded=recorded,
    )
    return rows, n_steps + int(new_step.sum())
