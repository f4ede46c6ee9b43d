"""This module opens a trace file: it checks footer and header, and reads no row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from moetier.traces.errors import InputError
from moetier.traces.schema import HEADER_KEY, VERSION, Header, arrow_schema

MAGIC = b"PAR1"
REDO = "capture or convert the trace again"


def open_trace(path: str | Path) -> tuple[Header, int]:
    """Return the header of the trace at *path* and its number of rows, reading the footer only.

    Raises:
        InputError: If the file is missing, truncated, empty, not Parquet, without a header, of
            another version, or its columns are not those of its header.
    """
    path = Path(path)
    footer = _footer(path)
    header = _header(path, footer.schema.to_arrow_schema())
    if footer.num_rows == 0:
        raise InputError("the trace has no rows", where=path, way_out=REDO)
    return header, footer.num_rows


def _footer(path: Path) -> Any:
    if not path.is_file():
        problem = "is a directory" if path.is_dir() else "no such file"
        raise InputError(problem, where=path, way_out="name a trace (.parquet)")
    with path.open("rb") as file:
        start = file.read(4)
        size = file.seek(0, 2)
        file.seek(max(size - 4, 0))
        end = file.read(4)
    if size == 0:
        raise InputError("the file is empty (0 bytes)", where=path, way_out=REDO)
    if start != MAGIC:
        raise InputError(
            f"not a Parquet file (it starts with {start!r})",
            where=path,
            way_out="`moetier trace convert` reads other formats",
        )
    if end != MAGIC:
        raise InputError(f"truncated after {size} bytes: no footer", where=path, way_out=REDO)
    try:
        return pq.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"damaged Parquet footer ({error})", where=path, way_out=REDO) from None


def _header(path: Path, schema: pa.Schema) -> Header:
    text = (schema.metadata or {}).get(HEADER_KEY)
    if text is None:
        raise InputError(
            "Parquet, but not a trace: its metadata has no 'moetier' header",
            where=path,
            way_out="`moetier trace convert` reads other formats",
        )
    try:
        header = Header.model_validate_json(text)
    except ValidationError as error:
        version = _version(text)
        if version not in (None, VERSION):
            raise _wrong_version(path, version) from None
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"header, key '{key}': {first['msg']}, got {first['input']!r}",
            where=path,
            way_out=REDO,
        ) from None
    if header.version != VERSION:
        raise _wrong_version(path, header.version)
    _check_columns_exist(path, schema, arrow_schema(header))
    _check_header_lists(path, header)
    return header


def _version(text: bytes) -> object:
    try:
        return json.loads(text).get("version")
    except (ValueError, AttributeError):
        return None


def _wrong_version(path: Path, version: object) -> InputError:
    return InputError(
        f"trace version {version}, this moetier reads version {VERSION}",
        where=path,
        way_out="capture or convert the trace again, or install the moetier that wrote it",
    )


def _check_columns_exist(path: Path, schema: pa.Schema, expected: pa.Schema) -> None:
    for item in expected:
        if item.name not in schema.names:
            raise InputError(f"column '{item.name}' is missing", where=path, way_out=REDO)
        found = schema.field(item.name).type
        if found != item.type:
            raise InputError(
                f"column '{item.name}' is {found}, expected {item.type}",
                where=path,
                way_out=REDO,
            )


def _check_header_lists(path: Path, header: Header) -> None:
    n = header.geometry.n_moe_layers
    per_layer: dict[str, Any] = {f"expert_bytes.{k}": v for k, v in header.expert_bytes.items()}
    per_layer |= {f"slice_bytes.{k}": v for k, v in header.slice_bytes.items()}
    if header.dense_bytes is not None:
        per_layer["dense_bytes"] = header.dense_bytes
    for key, items in per_layer.items():
        if len(items) != n:
            raise InputError(
                f"header, key '{key}' has {len(items)} layers, the geometry {n}",
                where=path,
                way_out=REDO,
            )
