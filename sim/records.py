"""This module defines the one result of a run: a table with a row per layer and step.

Simulated and real machines write the same columns, so comparing them is a join on step and layer.
Every metric is a pure function of this table (`sim.metrics`). All columns are integers: bytes,
nanoseconds, picojoules, counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from struct import Struct
from types import TracebackType

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from moetier.sim.energy import COMPONENTS, Energy
from moetier.sim.layout import LSB, Layout
from moetier.sim.machine.base import LayerTiming
from moetier.sim.plan import LayerPlan
from moetier.traces.files import replacing

Columns = dict[str, npt.NDArray[np.int64]]

# Written by the planner and the machine for every batch, in this order.
COMMON = (
    "step", "phase", "layer", "tokens", "context",
    "assignments",  # (token, expert) pairs computed
    "lookups", "misses", "late_hits", "compulsory",
    "resident_bytes", "peak_bytes",
    "start_ns", "dense_ns", "wait_ns", "copy_ns", "expert_ns",
)  # fmt: skip
# Follow from the others, and are computed for a whole block at once.
DERIVED = (
    "lookup_bytes", "miss_bytes",
    "fetch_bytes",  # demanded into the fastest tier
    "lsb_lookups", "lsb_misses",  # of LSB slices, where experts have them
    "end_ns",
)  # fmt: skip
# Zero for most batches of most policies, so kept only where they are not.
RARE = (
    "skipped", "skipped_bytes", "cpu", "cpu_bytes", "cpu_assignments",
    "degraded", "degraded_bytes",  # missing slices that compute did without
    "spared_bytes",  # looked up, and not read by compute
    "lower_lookups", "lower_hits",
    "lower_bytes",  # read from below the second tier, demanded or not
    "prefetch_issued", "prefetch_bytes", "prefetch_used", "prefetch_wasted_bytes",
    "cancelled_bytes",
    "dropped_bytes",  # prefetches that left the plan while they were queued
    "demoted_bytes", "warmup_bytes",
)  # fmt: skip
# Those of them that a policy which prefetches has for most batches.
EARLY = (
    "prefetch_issued", "prefetch_bytes", "prefetch_used", "prefetch_wasted_bytes", "dropped_bytes",
)  # fmt: skip
ENERGY = tuple(f"energy_{name}_pj" for name in COMPONENTS)
SCHEMA = pa.schema([pa.field(name, pa.int64()) for name in (*COMMON, *DERIVED, *RARE, *ENERGY)])

OnColumns = Callable[[Columns], None]

# Rows are packed as they come, which takes a third of the time of `array.extend`.
_COMMON, _RARE, _EARLY, _BYTES = (
    Struct(f"{n}q") for n in (len(COMMON), 1 + len(RARE), 1 + len(EARLY), 4)
)


class Recorder:
    """Collect a run's rows, add energy, and hand them on in blocks, so that memory stays flat.

    *sinks* hear of every block, in order: a `RecordWriter`, a metrics accumulator, a test.
    """

    def __init__(
        self, layout: Layout, energy: Energy, sinks: list[OnColumns], block_rows: int = 1 << 15
    ) -> None:
        """Begin with no rows; hand on *block_rows* rows at a time."""
        self._size, self._nbytes = layout.size, layout.nbytes
        self._each = np.array(layout.nbytes[:: layout.layer_slices])  # per layer, of whole experts
        self._parts, self._bit_sliced = layout.n_parts > 1, layout.bit_sliced
        self._energy, self._sinks = energy, sinks
        self._rows = bytearray()  # COMMON, batch after batch
        self._bytes = bytearray()  # where experts have parts: what `_of_parts` says
        self._rare = bytearray()  # row number, then RARE
        self._early = bytearray()  # row number, then EARLY, of other rows
        self._full = block_rows * _COMMON.size

    def add(self, plan: LayerPlan, timing: LayerTiming) -> None:
        """Add one batch."""
        batch = plan.batch
        start, dense, wait, copy, experts, _end, late, dropped = timing
        if plan.rare:
            self._add_rare(plan, dropped)
        elif plan.early or dropped:
            early = plan.prefetch
            self._early += _EARLY.pack(
                len(self._rows) // _COMMON.size,
                len(early), self._size(early) if early else 0,
                plan.prefetch_used, plan.prefetch_wasted, dropped,
            )  # fmt: skip
        if self._parts:
            self._bytes += _BYTES.pack(*self._of_parts(plan))
        self._rows += _COMMON.pack(
            batch.step, batch.phase, batch.layer, batch.n_tokens, batch.context,
            len(batch.experts) - plan.skip_assignments,
            len(plan.needed), len(plan.missing), late, plan.compulsory,
            plan.resident, plan.peak,
            start, dense, wait, copy, experts,
        )  # fmt: skip
        if len(self._rows) >= self._full:
            self.flush()

    def flush(self) -> None:
        """Hand on what has been collected."""
        if not self._rows:
            return
        common = np.frombuffer(self._rows, np.int64).reshape(-1, len(COMMON)).T.copy()
        columns: Columns = dict(zip(COMMON, common, strict=True))
        rare = np.zeros((len(RARE), common.shape[1]), np.int64)
        if self._rare:
            given = np.frombuffer(self._rare, np.int64).reshape(-1, 1 + len(RARE)).T
            rare[:, given[0]] = given[1:]
        if self._early:
            given = np.frombuffer(self._early, np.int64).reshape(-1, 1 + len(EARLY)).T
            for name, values in zip(EARLY, given[1:], strict=True):
                rare[RARE.index(name), given[0]] = values
        columns.update(zip(RARE, rare, strict=True))
        columns.update(zip(DERIVED, self._derived(columns), strict=True))
        columns.update(zip(ENERGY, self._energy.of(columns), strict=True))
        self._rows, self._bytes = bytearray(), bytearray()
        self._rare, self._early = bytearray(), bytearray()
        for sink in self._sinks:
            sink(columns)

    def _derived(self, rows: Columns) -> tuple[npt.NDArray[np.int64], ...]:
        """Return the columns of `DERIVED`; a miss not done without or run elsewhere is fetched."""
        if self._parts:
            looked_up, missed, lsb, lsb_missed = (
                np.frombuffer(self._bytes, np.int64).reshape(-1, 4).T.copy()
            )
        else:
            each = self._each[rows["layer"]]
            looked_up, missed = rows["lookups"] * each, rows["misses"] * each
            lsb = lsb_missed = np.zeros_like(missed)
        fetched = missed - rows["cpu_bytes"] - rows["skipped_bytes"] - rows["degraded_bytes"]
        end = rows["start_ns"] + rows["dense_ns"] + rows["wait_ns"] + rows["expert_ns"]
        return looked_up, missed, fetched, lsb, lsb_missed, end

    def _of_parts(self, plan: LayerPlan) -> tuple[int, int, int, int]:
        """Return the bytes looked up and missed, and how many LSB slices: those with odd ids."""
        needed, missing, size = plan.needed, plan.missing, self._size
        if not self._bit_sliced:
            return size(needed), size(missing), 0, 0
        lsb_missed = sum([s & LSB for s in missing]) if missing else 0
        return size(needed), size(missing), sum([s & LSB for s in needed]), lsb_missed

    def _add_rare(self, plan: LayerPlan, dropped: int) -> None:
        size = self._size
        skip, cpu, degrade = plan.skip, plan.cpu, plan.degrade
        cancelled, demoted = plan.cancelled, plan.demoted
        self._rare += _RARE.pack(
            len(self._rows) // _COMMON.size,
            len(skip), size(skip) if skip else 0, len(cpu), size(cpu) if cpu else 0,
            plan.cpu_assignments,
            len(degrade), size(degrade) if degrade else 0, plan.spared,
            plan.lower_lookups, plan.lower_hits,
            self._from_below(plan),
            len(plan.prefetch), size(plan.prefetch), plan.prefetch_used, plan.prefetch_wasted,
            size(cancelled) if cancelled else 0, dropped, size(demoted) if demoted else 0,
            plan.warmup_bytes,
        )  # fmt: skip

    def _from_below(self, plan: LayerPlan) -> int:
        """Return the bytes ordered from the tier below the second, less what was cancelled."""
        nbytes, total = self._nbytes, 0
        for slices, hops, least, sign in (
            (plan.fetch, plan.fetch_hops, 2, 1),
            (plan.prefetch, plan.prefetch_hops, 2, 1),
            (plan.cpu, plan.cpu_hops, 1, 1),
            (plan.cancelled, plan.cancelled_hops, 2, -1),
        ):
            if hops:
                found = [nbytes[s] for s, n in zip(slices, hops, strict=True) if n >= least]
                total += sign * sum(found)
        return total


class RecordWriter:
    """Write a run's rows to one Parquet file, which appears only when it is complete."""

    def __init__(self, path: Path) -> None:
        """Write to *path* once the context is left without an error."""
        self._path = path

    def __enter__(self) -> RecordWriter:
        """Open a temporary file beside the path."""
        with ExitStack() as stack:  # undone from the last to the first, whatever fails
            path = stack.enter_context(replacing(self._path))
            self._file = stack.enter_context(
                pq.ParquetWriter(
                    path, SCHEMA, compression="lz4", use_dictionary=False, write_statistics=False
                )
            )
            self._stack = stack.pop_all()
        return self

    def __call__(self, columns: Columns) -> None:
        """Append a block of rows."""
        arrays = [pa.array(columns[name]) for name in SCHEMA.names]
        self._file.write_table(pa.Table.from_arrays(arrays, schema=SCHEMA))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish the file, or remove what was written of it."""
        self._stack.__exit__(kind, error, trace)


def read_records(path: Path, block_rows: int = 1 << 16) -> Iterator[Columns]:
    """Yield the rows of a finished run in blocks, each a mapping from column to values."""
    with pq.ParquetFile(path) as file:
        for block in file.iter_batches(batch_size=block_rows):
            yield {
                name: block.column(name).to_numpy().astype(np.int64) for name in block.schema.names
            }
