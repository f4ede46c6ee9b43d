"""This module reads the routed experts that vLLM returns (`--enable-return-routed-experts`).

Three shapes are known. An .npz saved by hand from `RequestOutput` and `CompletionOutput`: per
request `routed_experts` (tokens, MoE layers, top-k), in older releases `prompt_routed_experts`
beside it, `prompt_tokens`, and perhaps `valid` (tokens,) and, for a server with expert load
balancing, `physical_to_logical_map` (layers, physical); names of several requests begin with
`REQUEST/`. Responses of the server, .json or .jsonl, whose choices carry the array as base64 of an
.npy. And a lone .npy. Ids fit in uint8, uint16 or int16.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moetier.traces.columns import Ints
from moetier.traces.errors import InputError
from moetier.traces.importers import register
from moetier.traces.importers._routed import (
    Routed,
    checked_ids,
    decode_base64,
    expected_rows,
    import_routed,
    load_arrays,
    load_npy,
    read_responses,
    to_logical,
)
from moetier.traces.registry import Natural
from moetier.traces.schema import Header

KINDS = (".npz", ".npy", ".json", ".jsonl")
_KEYS = (
    "routed_experts", "prompt_routed_experts", "prompt_tokens", "completion_tokens", "valid",
    "physical_to_logical_map",
)  # fmt: skip


@register("vllm")
def import_vllm(
    source: Path,
    out: Path,
    model: str | None = None,
    n_experts: int | None = None,
    prompt_tokens: Natural | None = None,
) -> Header:
    """Import the routed experts of vLLM requests: .npz, .npy, or responses as .json or .jsonl.

    *model* names a published geometry; without it *n_experts* gives the number of experts.
    *prompt_tokens* says where decode begins in a file that does not (0: all rows are decode).

    Raises:
        InputError: If the file is not of these shapes; names the key or line and the way out.
    """
    source = Path(source)
    if not source.is_file() or source.suffix not in KINDS:
        raise InputError(
            "no such file" if not source.exists() else f"is not one of {', '.join(KINDS)}",
            where=source,
            way_out="save the arrays with np.savez, or keep the server's responses as .jsonl",
        )

    def requests() -> Iterator[Routed]:
        if source.suffix == ".npz":
            return _from_arrays(source, prompt_tokens)
        if source.suffix == ".npy":
            return _from_npy(source, prompt_tokens)
        return _from_responses(source)

    return import_routed(
        out,
        requests,
        source=source,
        importer="vllm",
        model=model,
        n_experts=n_experts,
    )


def _from_arrays(source: Path, prompt_tokens: int | None) -> Iterator[Routed]:
    arrays = load_arrays(source)
    groups: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        request, _, key = name.rpartition("/")
        if key not in _KEYS:
            raise InputError(
                f"key '{name}'",
                where=source,
                way_out=f"known: {', '.join(_KEYS)}, perhaps after"
                " the name of a request and a slash",
            )
        groups.setdefault(request, {})[key] = array
    shared = groups.get("", {}).get("physical_to_logical_map")
    for request, group in groups.items():
        where = f"{source}: {request}/" if request else str(source)
        if "routed_experts" not in group:
            if request or "prompt_routed_experts" in group or len(groups) == 1:
                raise InputError("no key 'routed_experts'", where=where, way_out="save it too")
            continue  # only the map that all requests share
        ids = checked_ids(group["routed_experts"], f"{where}: routed_experts")
        said = group.get("prompt_tokens")
        prompt = prompt_tokens if said is None else _count(said, "prompt_tokens", where)
        if "prompt_routed_experts" in group:
            before = checked_ids(group["prompt_routed_experts"], f"{where}: prompt_routed_experts")
            if before.shape[1:] != ids.shape[1:]:
                raise InputError(
                    f"prompt_routed_experts has shape {before.shape}, routed_experts {ids.shape}",
                    where=where,
                    way_out="expected the same layers and top-k",
                )
            if prompt is not None and prompt != len(before):
                raise InputError(
                    f"prompt_routed_experts has {len(before)} rows for {prompt} prompt tokens",
                    where=where,
                    way_out="rows that do not line up with the tokens cannot be used",
                )
            ids, prompt = np.concatenate([before, ids]), len(before)
        answer = group.get("completion_tokens")
        if answer is not None and prompt is not None:
            expected_rows(len(ids), prompt, _count(answer, "completion_tokens", where), where)
        table = group.get("physical_to_logical_map", shared)
        yield _routed(ids, prompt, where, valid=group.get("valid"), table=table)


def _from_npy(source: Path, prompt_tokens: int | None) -> Iterator[Routed]:
    ids = checked_ids(load_npy(source.read_bytes(), source), str(source))
    yield _routed(ids, prompt_tokens, str(source))


def _from_responses(source: Path) -> Iterator[Routed]:
    for where, item in read_responses(source):
        choices, usage = item.get("choices"), item.get("usage")
        if not isinstance(choices, list) or not isinstance(usage, dict):
            raise InputError(
                "no 'choices' and 'usage'", where=where, way_out="keep whole responses of vLLM"
            )
        answer = usage.get("completion_tokens") if len(choices) == 1 else None
        for choice in choices:
            here = f"{where}: choices[{choice.get('index', 0)}].routed_experts"
            text = choice.get("routed_experts")
            if text is None:
                raise InputError(
                    "missing", where=here, way_out="serve with --enable-return-routed-experts"
                )
            ids = checked_ids(load_npy(decode_base64(text, here), here), here)
            prompt = expected_rows(len(ids), usage.get("prompt_tokens"), answer, here)
            yield _routed(ids, prompt, here)


def _routed(
    ids: Ints, prompt: int | None, where: str, *, valid: Any = None, table: Any = None
) -> Routed:
    if prompt is None:
        raise InputError(
            "does not say where decode begins",
            where=where,
            way_out="give --option prompt_tokens=N, 0 if all rows are decode",
        )
    if prompt > len(ids):
        raise InputError(
            f"{prompt} prompt tokens, but {len(ids)} rows",
            where=where,
            way_out="rows that do not line up with the tokens cannot be used",
        )
    if valid is not None:
        valid = np.asarray(valid)
        if valid.shape != (len(ids),) or valid.dtype != np.bool_:
            raise InputError(
                f"valid has shape {valid.shape} and type {valid.dtype}",
                where=where,
                way_out=f"expected a bool for each of the {len(ids)} tokens",
            )
    if table is not None:
        ids = to_logical(ids, table, where)
    return Routed(where, ids, prompt, valid)


def _count(value: Any, key: str, where: str) -> int:
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "iu" or int(array.reshape(())) < 0:
        raise InputError(f"{key} is {array!r}", where=where, way_out="expected one whole number")
    return int(array.reshape(()))
