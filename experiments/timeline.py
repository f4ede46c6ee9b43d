"""This module writes what occupied each lane of a run as Chrome Trace Event JSON, for Perfetto.

Times are microseconds; whole nanoseconds survive as decimals. One process is a device, one thread
a lane (compute, a link's lane); what is resident is a counter.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import moetier
from moetier.sim.machine.base import Span
from moetier.traces.errors import InputError
from moetier.traces.files import replacing

MAX_EVENTS = 5_000_000
"""About a gigabyte of JSON, which is what viewers open."""

_COUNTER = "resident in "


class TimelineWriter:
    """Streams spans to a file; use as a context manager, and call it with each span.

    The file appears under its name only when the block ends without an error.
    """

    def __init__(self, path: Path, device: str, max_events: int = MAX_EVENTS) -> None:
        """Write to *path* what *device* did; refuse more than *max_events*."""
        self._path, self._device, self._max = path, device, max_events
        self._pid = 0
        self._lanes: dict[str, int] = {}
        self.n_events = 0

    def __enter__(self) -> TimelineWriter:
        """Open a temporary file beside the path."""
        with ExitStack() as stack:  # undone from the last to the first, whatever fails
            path = stack.enter_context(replacing(self._path))
            self._file = stack.enter_context(path.open("w", encoding="utf-8"))
            self._stack = stack.pop_all()
        other = {"moetier": moetier.__version__, "times": "modelled"}
        head = json.dumps({"displayTimeUnit": "ms", "otherData": other})[:-1]
        self._file.write(head + ', "traceEvents": [\n')
        self._next(self._device, "")
        return self

    def process(self, device: str) -> None:
        """Go on with what another *device* did, in lanes of its own."""
        self._next(device, ",\n")

    def _next(self, device: str, before: str) -> None:
        self._pid += 1
        self._lanes = {}
        self._file.write(before + json.dumps(self._meta("process_name", 0, {"name": device})))

    def __call__(self, span: Span) -> None:
        """Write one span; raise `InputError` when the file would become too long to open."""
        self.n_events += 1
        if self.n_events > self._max:
            raise InputError(
                f"more than {self._max} events, which viewers do not open",
                where=self._path,
                way_out="shorten the run, as with --set synthetic.tokens=100",
            )
        if span.lane.startswith(_COUNTER):
            self._write({
                "ph": "C", "name": span.lane, "pid": self._pid, "ts": span.start / 1000,
                "args": dict(span.info),
            })  # fmt: skip
            return
        self._write({
            "ph": "X", "name": span.name, "cat": _category(span), "pid": self._pid,
            "tid": self._tid(span.lane), "ts": span.start / 1000,
            "dur": (span.end - span.start) / 1000, "args": dict(span.info),
        })  # fmt: skip

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish the file, or remove what was written of it."""
        if error is not None:
            self._stack.__exit__(kind, error, trace)
            return
        with self._stack:
            self._file.write("\n]}\n")

    def _tid(self, lane: str) -> int:
        """Return the lane's number, naming it in the file at first sight."""
        if lane not in self._lanes:
            tid = self._lanes[lane] = len(self._lanes) + 1
            self._write(self._meta("thread_name", tid, {"name": lane}))
            self._write(self._meta("thread_sort_index", tid, {"sort_index": _order(lane) + tid}))
        return self._lanes[lane]

    def _meta(self, name: str, tid: int, args: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "name": name, "pid": self._pid, "tid": tid, "args": args}

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(",\n" + json.dumps(event, separators=(",", ":")))


def _category(span: Span) -> str:
    cause = span.info.get("cause")
    return f"copy,{cause}" if cause else f"compute,{span.name}"


def _order(lane: str) -> int:
    """Return where a lane stands: processors first, then links."""
    return 0 if lane == "compute" else 100 if lane == "cpu" else 200
