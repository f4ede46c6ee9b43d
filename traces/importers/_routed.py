"""This module turns arrays of expert ids per request, as serving engines return them, into rows.

An engine records one array (tokens, layers, top-k) per request and no forward passes. So a request
becomes a prefill, if it has prompt rows, and a decode step per later token; requests follow one
another. How the engine batched them, and in what chunks it read the prompt, is not known.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from moetier.traces.batch import DECODE, PREFILL
from moetier.traces.columns import PAD, Bools, Ints
from moetier.traces.errors import InputError
from moetier.traces.geometry import load_geometry
from moetier.traces.importers._names import fit_geometry
from moetier.traces.io import TraceWriter
from moetier.traces.schema import Header, Provenance

UNREADABLE = (
    OSError, ValueError, EOFError, LookupError, OverflowError, SyntaxError,
    TypeError, RuntimeError, MemoryError, TokenError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""What NumPy raises for a file of arrays that was cut or changed."""

UNKNOWN = [
    "weights", "scores", "slot order", "batches", "prefill chunks", "expert_bytes", "dense_bytes",
]  # fmt: skip


@dataclass(slots=True)
class Routed:
    """One request: *ids* (tokens, layers, top-k), the first *prompt* tokens read together.

    *valid* (tokens,) is false for tokens that nobody routed; *where* names it in messages.
    """

    where: str
    ids: Ints
    prompt: int
    valid: Bools | None = None
    first: int = 0  # position of the first token


Requests = Callable[[], Iterator[Routed]]


def import_routed(
    out: Path,
    requests: Requests,
    *,
    source: Path,
    importer: str,
    model: str | None,
    n_experts: int | None,
    unknown: list[str] | None = None,
) -> Header:
    """Write the trace of *requests*, which is called twice: to learn the shape, then to write.

    The layers of an array are the MoE layers, or all layers, of which those that routed nothing
    are left out. Tokens at which every layer says only zeros are refused, as zeros are what an
    engine returns for rows that it never wrote; trailing tokens that repeat 0, 1, ... k - 1 in
    every layer are padding.

    Raises:
        InputError: If an id, a shape or a row is wrong; names the request, token, layer and value.
    """
    layers, top_k, largest = _survey(requests, source)
    said = [*UNKNOWN, *(unknown or [])]
    index = np.flatnonzero(layers)
    if model is not None:
        known = load_geometry(model)
        n_experts = n_experts or known.n_experts
        all_layers = len(layers) == known.n_layers
        moe_layers = index.tolist() if all_layers else list(range(len(layers)))
        if not all_layers and len(layers) == known.n_moe_layers:
            index, moe_layers = np.arange(len(layers)), known.moe_layers
    else:
        moe_layers = index.tolist()
        said += ["model", "layer"] + (["n_experts"] if n_experts is None else [])
    n_experts = largest + 1 if n_experts is None else n_experts
    if largest >= n_experts:
        raise InputError(
            f"expert {largest} occurs, but there are {n_experts} experts",
            where=source,
            way_out="name the right model or n_experts; ids above it may be physical ones (give "
            "physical_to_logical_map) or a shared expert fused into the routed ones",
        )
    geometry, missing = fit_geometry(
        source.stem,
        model,
        n_experts=n_experts,
        top_k=top_k,
        moe_layers=moe_layers,
        n_layers=None,
        where=str(source),
    )
    header = Header(
        geometry=geometry,
        unknown=said + missing,
        provenance=Provenance(kind="imported", model=model, importer=importer),
    )
    with TraceWriter(out, header) as writer:
        step = 0
        for number, request in enumerate(requests()):
            valid = token_validity(request)
            ids = request.ids[:, index]
            for phase, start, end in _phases(request, len(ids)):
                writer.add(**rows_of(ids, valid, number, phase, step, request.first, start, end))
                step += 1 if phase == PREFILL else end - start
    return header


def rows_of(
    ids: Ints, valid: Bools, request: int, phase: int, step: int, first: int, start: int, end: int
) -> dict[str, Any]:
    """Return the rows of the tokens *start* to *end* of one request, as `TraceWriter.add` takes.

    A prefill is one step, its rows ordered by layer; each decoded token is a step of its own.
    """
    n, layers, k = end - start, ids.shape[1], ids.shape[2]
    part, there = ids[start:end], valid[start:end]
    token, layer = np.arange(n), np.arange(layers)
    if phase == PREFILL:
        part, token = part.transpose(1, 0, 2), np.tile(token, layers)
        moe_layer, there = np.repeat(layer, n), np.tile(there, layers)
        steps: Any = step
    else:
        token, there = np.repeat(token, layers), np.repeat(there, layers)
        moe_layer, steps = np.tile(layer, n), step + token
    experts = part.reshape(-1, k)
    return {
        "request": request,
        "phase": phase,
        "step": steps,
        "position": first + start + token,
        "moe_layer": moe_layer,
        "experts": experts,
        "valid": there & (experts != PAD).any(axis=1),
    }


def token_validity(request: Routed) -> Bools:
    """Return which tokens were routed: those said to be, less padding; refuse rows of zeros."""
    ids, k = request.ids, request.ids.shape[2]
    valid: Bools = np.ones(len(ids), np.bool_) if request.valid is None else request.valid.copy()
    if ids.shape[1] * k > 1:
        padding = (ids == np.arange(k)).all(axis=(1, 2))
        tail = len(ids) - int(np.argmin(padding[::-1])) if not padding.all() else 0
        valid[tail:] = False
    valid &= np.asarray((ids != PAD).any(axis=(1, 2)))
    zeros = (ids <= 0).all(axis=(1, 2)) & valid
    if k > 1 and zeros.any():
        raise InputError(
            f"token {int(np.argmax(zeros))}: all ids of all layers are 0, which an engine returns "
            "for rows that it never wrote",
            where=request.where,
            way_out="record them again, or mark them: `valid`, a mask of the tokens",
        )
    return valid


def checked_ids(values: Any, where: str) -> Ints:
    """Return *values* as ids (tokens, layers, top-k) int64, what is negative as `PAD`."""
    ids = np.asarray(values)
    if ids.ndim != 3 or not ids.size:
        raise InputError(
            f"has shape {ids.shape}", where=where, way_out="expected (tokens, layers, top-k)"
        )
    if ids.dtype.kind not in "iu":
        raise InputError(f"holds {ids.dtype}", where=where, way_out="expected whole numbers")
    limit = np.iinfo(np.int16).max
    if int(ids.max()) > limit:
        at = np.unravel_index(int(np.argmax(ids)), ids.shape)
        raise InputError(
            f"token {at[0]}, layer {at[1]}: expert {int(ids.max())}",
            where=where,
            way_out=f"ids go to {limit}; a -1 stored without a sign reads like this",
        )
    ids = ids.astype(np.int64)
    return np.where(ids < 0, PAD, ids)


def to_logical(ids: Ints, table: Any, where: str) -> Ints:
    """Return the logical ids of physical *ids*; *table* is (layers, physical experts)."""
    known = np.asarray(table)
    if known.ndim != 2 or known.shape[0] != ids.shape[1] or known.dtype.kind not in "iu":
        raise InputError(
            f"physical_to_logical_map has shape {known.shape}",
            where=where,
            way_out=f"expected ({ids.shape[1]} layers, physical experts) whole numbers",
        )
    if int(ids.max()) >= known.shape[1]:
        raise InputError(
            f"physical expert {int(ids.max())} is not in physical_to_logical_map, which has "
            f"{known.shape[1]}",
            where=where,
            way_out="give the map that was in force",
        )
    layer = np.arange(ids.shape[1])[:, None]
    return np.where(ids == PAD, PAD, known[layer, np.maximum(ids, 0)])


def load_arrays(source: Path) -> dict[str, Any]:
    """Return the arrays of an .npz, loaded one by one as they are asked for; nothing is unpickled.

    Raises:
        InputError: If it is no such file, or an array holds Python objects.
    """
    try:
        # opened here, since np.load would leave a damaged file open
        with source.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            if not hasattr(file, "files"):
                raise InputError("holds one array", where=source, way_out="name it .npy")
            return {name: file[name] for name in file.files}
    except InputError:
        raise
    except UNREADABLE as error:
        raise InputError(
            f"cannot be read as .npz ({error})",
            where=source,
            way_out="save plain arrays of numbers with np.savez",
        ) from None


def decode_base64(text: Any, where: str) -> bytes:
    """Return the bytes of *text*; raise `InputError` for what is not base64."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise InputError(
            f"not base64 ({error})", where=where, way_out="keep the response as it came"
        ) from None


def load_npy(data: bytes, where: str | Path) -> Any:
    """Return the array in the bytes of an .npy file; nothing is unpickled."""
    try:
        return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except UNREADABLE as error:
        raise InputError(
            f"cannot be read as .npy ({error})",
            where=where,
            way_out="save a plain array of numbers with np.save",
        ) from None


def read_responses(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the content of each response in a .json (one, or a list) or .jsonl."""
    whole = source.suffix == ".json"
    with source.open(encoding="utf-8", errors="replace") as file:
        texts = [file.read()] if whole else file
        for line, text in enumerate(texts, start=1):
            if not text.strip():
                continue
            place = str(source) if whole else f"{source}: line {line}"
            try:
                found = json.loads(text)
            except ValueError as error:
                raise InputError(
                    f"not JSON ({error})", where=place, way_out="repair or remove it"
                ) from None
            items = found if whole and isinstance(found, list) else [found]
            for at, item in enumerate(items):
                here = f"{place}: item {at}" if len(items) > 1 else place
                if not isinstance(item, dict):
                    raise InputError("is no object", where=here, way_out="expected a response")
                yield here, item


def expected_rows(rows: int, prompt: Any, answer: Any, where: str) -> int:
    """Return the number of prompt tokens, checked against the *rows* of the array.

    The last sampled token is never computed, so that prompt + answer - 1 rows are right.
    """
    if type(prompt) is not int or prompt < 0 or (answer is not None and type(answer) is not int):
        raise InputError(
            f"prompt_tokens {prompt!r}, completion_tokens {answer!r}",
            where=where,
            way_out="keep the counts of tokens: nothing else says where decode begins",
        )
    if answer is not None and rows != prompt + answer - 1:
        raise InputError(
            f"{rows} rows for {prompt} prompt and {answer} answer tokens",
            where=where,
            way_out=f"expected {prompt + answer - 1}, as the last token is never computed; rows "
            "that are missing cannot be placed",
        )
    return min(prompt, rows)


def _survey(requests: Requests, source: Path) -> tuple[Bools, int, int]:
    """Check all requests; return which layers routed anything, top-k and the largest id."""
    used: Bools | None = None
    top_k, largest = 0, -1
    for request in requests():
        ids = request.ids
        if used is None:
            used, top_k = np.zeros(ids.shape[1], np.bool_), ids.shape[2]
        if ids.shape[1:] != (len(used), top_k):
            raise InputError(
                f"has {ids.shape[1]} layers and top-{ids.shape[2]}, the requests before have "
                f"{len(used)} and top-{top_k}",
                where=request.where,
                way_out="convert one model at a time",
            )
        here = ids[token_validity(request)]
        if len(here):
            used |= (here > 0).any(axis=(0, 2)) if top_k > 1 else (here != PAD).any(axis=(0, 2))
            largest = max(largest, int(here.max()))
            _refuse_repeats(here, request.where)
    if used is None or largest < 0:
        raise InputError("no routed tokens", where=source, way_out="record it again")
    return used, top_k, largest


def _refuse_repeats(ids: Ints, where: str) -> None:
    ordered = np.sort(ids, axis=2)
    twice: Bools = np.asarray((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] > PAD))
    used: Bools = np.asarray((ids > 0).any(axis=(0, 2)))
    twice &= used[:, None]  # a layer of zeros only is no MoE layer
    if twice.any():
        token, layer, slot = (int(i[0]) for i in np.nonzero(twice))
        raise InputError(
            f"routed token {token}, layer {layer}: expert {ordered[token, layer, slot]} twice",
            where=where,
            way_out="rows that were never written are marked by `valid`; two replicas of one "
            "expert in a token mean the wrong physical_to_logical_map",
        )


def _phases(request: Routed, n: int) -> Iterator[tuple[int, int, int]]:
    if request.prompt:
        yield PREFILL, 0, request.prompt
    if n > request.prompt:
        yield DECODE, request.prompt, n
