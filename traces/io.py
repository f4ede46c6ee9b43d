"""This module writes traces and reads them back, both in constant memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from moetier.traces.batch import LayerBatch
from moetier.traces.batching import batches_of
from moetier.traces.check import RowCheck
from moetier.traces.columns import Columns, ColumnSource, build, concat, from_arrow
from moetier.traces.errors import InputError
from moetier.traces.files import replacing
from moetier.traces.opening import open_trace
from moetier.traces.schema import Header, arrow_schema

ROWS_PER_GROUP = 65_536
GROUP_BYTES = 16 << 20
"""Wide rows (with scores) make a group smaller: memory while reading is about one group."""

CHUNK_ROWS = 16_384


class TraceWriter:
    """Writes a trace; use as a context manager.

    The file appears under its name only when the block ends without an error; until then it has
    a temporary name beside it, and an error removes it.
    """

    def __init__(self, path: str | Path, header: Header, rows_per_group: int | None = None) -> None:
        """Write to *path*; a row group is written for every *rows_per_group* rows."""
        self.path, self.header = Path(path), header
        width = sum(_width(item.type) for item in arrow_schema(header))
        self.rows_per_group = rows_per_group or max(
            1, min(ROWS_PER_GROUP, GROUP_BYTES // max(width, 1))
        )
        self.n_rows = 0
        self._held: list[Columns] = []
        self._n_held = 0
        self._check = RowCheck(header, self.path)
        self._stack = ExitStack()
        self._file: Any = None

    def __enter__(self) -> Self:
        """Open the temporary file; raise `InputError` where none can be written."""
        temporary = self._stack.enter_context(replacing(self.path))
        self._file = pq.ParquetWriter(
            temporary, arrow_schema(self.header), compression="zstd", write_page_checksum=True
        )
        return self

    def add(self, **arrays: Any) -> None:
        """Add rows given as arrays; see `moetier.traces.columns.build` for their names and shapes.

        Rows come ordered by step, then MoE layer, and all rows of a batch with no other between.
        """
        self.add_columns(build(self.header, **arrays))

    def add_columns(self, rows: Columns) -> None:
        """Add *rows*; raise `InputError` when one of them could not be read back."""
        if self._file is None:
            raise ValueError("use TraceWriter as a context manager: `with TraceWriter(...) as w:`")
        self._check.check(rows)
        self._held.append(rows)
        self._n_held += len(rows)
        self.n_rows += len(rows)
        if self._n_held >= self.rows_per_group:
            self._flush(final=False)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish the file and give it its name, or remove it after an error."""
        if error is not None:
            self._file.close()
            self._stack.__exit__(kind, error, trace)
            return
        with self._stack:
            try:
                self._flush(final=True)
            finally:
                self._file.close()
            if not self.n_rows:
                raise InputError("no rows to write", where=self.path, way_out="nothing was routed")

    def _flush(self, *, final: bool) -> None:
        if not self._held:
            return
        rows, size = concat(self._held), self.rows_per_group
        end = len(rows) if final else len(rows) // size * size
        for start in range(0, end, size):
            part = rows.take(slice(start, min(start + size, end)))
            table = pa.Table.from_batches([part.to_arrow(self.header)])
            self._file.write_table(table, row_group_size=size)
        self._held = [] if end == len(rows) else [rows.take(slice(end, None))]
        self._n_held = len(rows) - end


class TraceReader:
    """A trace file as a `Source`. It holds no open file, so it can be sent to another process."""

    def __init__(self, path: str | Path, *, with_scores: bool = False) -> None:
        """Open the trace at *path*, checking its footer and header.

        *with_scores* also reads `scores` and the predictions, which are wide: one float per
        expert, token and layer.

        Raises:
            InputError: If the file is not a trace; `batches` raises it for a row that is wrong.
        """
        self.path, self.with_scores = Path(path), with_scores
        self.header, self.n_rows = open_trace(self.path)

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of the file's content, in hexadecimal."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def columns(self, names: Sequence[str] | None = None) -> Iterator[Columns]:
        """Yield the rows in chunks of arrays, with the columns *names* beside the plain ones.

        Default: `weights`, `recorded` where there, and with `with_scores` also the wide columns.
        """
        return self._read(self._optional() if names is None else list(names))

    def batches(self) -> Iterator[LayerBatch]:
        """Yield the batches in forward order. Can be called again."""
        return batches_of(self.columns())

    def validate(self) -> int:
        """Read and check every row and column; return the number of rows.

        Raises:
            InputError: At the first row that is wrong, naming row, column and value.
        """
        known = [item.name for item in arrow_schema(self.header)]
        return sum(len(chunk) for chunk in self._read(known))

    def _optional(self) -> list[str]:
        wide = ("scores", "predicted_")
        plain = ("weights", "recorded")
        names = [item.name for item in arrow_schema(self.header)]
        return [
            name for name in names if name in plain or (self.with_scores and name.startswith(wide))
        ]

    def _read(self, optional: list[str]) -> Iterator[Columns]:
        needed = ["request", "phase", "step", "position", "moe_layer", "experts", "valid"]
        check = RowCheck(self.header, self.path, full=True)
        names = [*needed, *(name for name in optional if name not in needed)]
        with pq.ParquetFile(self.path, page_checksum_verification=True) as file:
            try:
                # group by group: one call for all groups keeps every group it has read (measured)
                for group in range(file.num_row_groups):
                    for batch in file.iter_batches(CHUNK_ROWS, row_groups=[group], columns=names):
                        check.check_arrow(batch)
                        yield check.check(from_arrow(batch))
                check.finish()
            except (pa.ArrowException, OSError) as error:
                raise InputError(
                    f"damaged after row {check.rows} ({error})",
                    where=self.path,
                    way_out="capture or convert the trace again",
                ) from None


class ArrayTrace:
    """A trace in memory: the same rows, the same batches, no file."""

    def __init__(self, header: Header, chunks: Sequence[Columns]) -> None:
        """Hold *chunks* of rows, in forward order; raise `InputError` when a row is wrong."""
        self.header, self._chunks = header, list(chunks)
        check = RowCheck(header, "rows")
        for chunk in self._chunks:
            check.check(chunk)
        self.n_rows = check.rows

    @classmethod
    def of(cls, source: ColumnSource) -> ArrayTrace:
        """Return all rows of *source* in memory."""
        return cls(source.header, list(source.columns()))

    def columns(self) -> Iterator[Columns]:
        """Yield the rows in chunks of arrays."""
        return iter(self._chunks)

    def batches(self) -> Iterator[LayerBatch]:
        """Yield the batches in forward order. Can be called again."""
        return batches_of(self.columns())


def write_trace(source: ColumnSource, path: str | Path) -> Path:
    """Write all rows of *source* to *path*, chunk by chunk, and return the path."""
    with TraceWriter(path, source.header) as writer:
        for chunk in source.columns():
            writer.add_columns(chunk)
    return Path(path)


def _width(kind: pa.DataType) -> int:
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _width(kind.value_type)
    return max(1, int(kind.bit_width) // 8)
