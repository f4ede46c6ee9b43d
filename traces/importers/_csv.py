"""This module reads CSV in blocks of whole lines and names the line of anything malformed."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from moetier.traces.columns import Ints
from moetier.traces.errors import InputError

BLOCK_BYTES = 8 << 20


@dataclass(slots=True)
class Table:
    """Columns of a block of a CSV, with the line each row stands on (from 1)."""

    columns: dict[str, Any]
    lines: Ints

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.lines)

    def take(self, rows: Any) -> Table:
        """Return the chosen *rows*, in the order given."""
        return Table({name: item[rows] for name, item in self.columns.items()}, self.lines[rows])


def join(tables: list[Table]) -> Table:
    """Return the rows of all *tables*."""
    names = tables[0].columns
    return Table(
        {name: np.concatenate([table.columns[name] for table in tables]) for name in names},
        np.concatenate([table.lines for table in tables]),
    )


def read_tables(
    path: Path,
    needed: Mapping[str, type],
    optional: Mapping[str, type],
    *,
    whole: bool = False,
) -> Iterator[Table]:
    """Yield the rows of the CSV at *path*; in blocks, or *whole*.

    Lines that begin with `#` and empty lines are skipped; the first other line names the columns.
    The value `nan` is not known (NaN) in a float column and refused in an integer one.

    Raises:
        InputError: If a column is missing or a line malformed; names the line.
    """
    with path.open("rb") as file:
        names: list[str] = []
        line = 0
        for text in file:
            line += 1
            if text.strip() and not text.startswith(b"#"):
                names = [name.strip() for name in text.decode(errors="replace").split(",")]
                break
        for name in needed:
            if name not in names:
                raise InputError(
                    f"line {line}: no column '{name}' (found: {', '.join(names) or 'nothing'})",
                    where=path,
                    way_out="is it this format?",
                )
        types = {name: kind for name, kind in {**needed, **optional}.items() if name in names}
        while block := file.read(-1 if whole else BLOCK_BYTES):
            block += file.readline()
            texts = block.split(b"\n")
            if not texts[-1]:
                texts.pop()
            lines = np.arange(line + 1, line + 1 + len(texts))
            line += len(texts)
            if b"#" in block or b"\r" in block or b"" in texts:
                keep = [bool(t.strip()) and not t.startswith(b"#") for t in texts]
                texts = [t.rstrip(b"\r") for t, kept in zip(texts, keep, strict=True) if kept]
                lines, block = lines[keep], b"\n".join(texts)
            if texts:
                yield Table(_parse(path, block, texts, lines, names, types), lines)


def _parse(
    path: Path,
    block: bytes,
    texts: list[bytes],
    lines: Ints,
    names: list[str],
    types: Mapping[str, type],
) -> dict[str, Any]:
    arrow = {name: pa.float32() if kind is float else pa.int64() for name, kind in types.items()}
    try:
        table = pa_csv.read_csv(
            io.BytesIO(block),
            read_options=pa_csv.ReadOptions(column_names=names, use_threads=False),
            parse_options=pa_csv.ParseOptions(ignore_empty_lines=False),
            convert_options=pa_csv.ConvertOptions(
                column_types=arrow, include_columns=list(types), null_values=["nan", "-nan", "NaN"]
            ),
        )
    except pa.ArrowInvalid as error:
        _find_bad_line(path, texts, lines, names, types, str(error))
    for name, kind in types.items():
        if kind is int and table.column(name).null_count:
            _find_bad_line(path, texts, lines, names, types, f"column '{name}' has nan")
    return {name: table.column(name).to_numpy() for name in types}


def _find_bad_line(
    path: Path,
    texts: list[bytes],
    lines: Ints,
    names: list[str],
    types: Mapping[str, type],
    problem: str,
) -> NoReturn:
    for text, line in zip(texts, lines.tolist(), strict=True):
        cells = text.decode(errors="replace").strip().split(",")
        if len(cells) != len(names):
            raise InputError(
                f"line {line}: {len(cells)} values, expected {len(names)}",
                where=path,
                way_out="a last line cut short means that the recording was interrupted",
            )
        for name, cell in zip(names, cells, strict=True):
            kind = types.get(name)
            try:
                if kind is not None:
                    kind(cell)
            except ValueError:
                wanted = "a whole number" if kind is int else "a number"
                raise InputError(
                    f"line {line}, column '{name}': {cell!r} is not {wanted}",
                    where=path,
                    way_out="repair or remove the line",
                ) from None
    raise InputError(f"lines {lines[0]} to {lines[-1]}: {problem}", where=path)
