"""This module simulates a few points again to show what occupied each lane in the first tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from moetier.experiments.config import RunConfig, load_hardware
from moetier.experiments.report.figure import Figure, Table, number
from moetier.experiments.report.folder import Entry
from moetier.experiments.report.palette import COLORS, label
from moetier.experiments.runs import popularity_of, setting_of
from moetier.experiments.sources import open_source
from moetier.sim.machine.base import Span
from moetier.sim.run import TraceSource, simulate
from moetier.sim.yaml_input import check
from moetier.traces.batch import DECODE
from moetier.traces.errors import InputError

TOKENS = 2
"""Decode steps that a timeline shows."""

MAX_SPANS = 3_000
"""More than these a figure does not show; the first ones are drawn, and it says so."""

_PARTS = ("dense", "wait", "experts", "demand copy", "prefetch copy", "other")


class _Enough(Exception):
    """The simulation has come as far as the figure goes."""


class _Window:
    """Collects the spans of decode steps from *first* on, and stops the run after *n* of them."""

    def __init__(self, first: int, n: int) -> None:
        self.first, self.last = first, first + n
        self.spans: list[Span] = []
        self.begin: int | None = None
        self._before: list[Span] = []

    def __call__(self, span: Span) -> None:
        step = span.info.get("step")
        if isinstance(step, int) and step >= self.last:
            raise _Enough
        if isinstance(step, int) and step >= self.first and self.begin is None:
            begin = self.begin = span.start
            self.spans += [one for one in self._before if one.end > begin]
            self._before.clear()
        if span.lane.startswith("resident in "):
            return
        (self._before if self.begin is None else self.spans).append(span)
        if len(self._before) > 4096:  # copies that ended long before the first token
            del self._before[:2048]


def timeline(entry: Entry, title: str, name: str, tokens: int = TOKENS) -> Figure:
    """Return the first decode *tokens* of *entry*, simulated again, as a figure called *name*.

    Raises:
        InputError: If the point cannot be simulated: it runs a model, or its trace is not there.
    """
    config = entry.outcome.get("config")
    if not isinstance(config, dict):
        raise InputError("its config is not known")
    if config.get("live") is not None:
        raise InputError(
            "it runs a model", way_out="`moetier evaluate --records` would have to run it again"
        )
    run = check(RunConfig, config, title)
    source = open_source(run).source
    first = _first_decode_step(source)
    window = _Window(first, tokens)
    with suppress(_Enough):
        simulate(
            source,
            setting_of(run, load_hardware(run.hardware)),
            on_span=window,
            popularity=popularity_of(run, source),
        )
    if window.begin is None or not window.spans:
        raise InputError("it decodes no token")
    return _figure(window.spans, window.begin, title, name, tokens)


def _first_decode_step(source: TraceSource) -> int:
    for batch in source.columns():
        steps = batch.step[batch.phase == DECODE]
        if len(steps):
            return int(steps.min())
    raise InputError("it decodes no token")


def _figure(spans: Sequence[Span], begin: int, title: str, name: str, tokens: int) -> Figure:
    ordered = sorted(spans, key=lambda span: (span.start, span.lane))
    drawn = ordered[:MAX_SPANS]
    lanes = sorted({span.lane for span in drawn}, key=_order)
    traces: list[dict[str, Any]] = []
    busy: dict[tuple[str, str], list[int]] = {}
    for span in drawn:
        busy.setdefault((span.lane, _part(span)), []).append(span.end - span.start)
    for at, part in enumerate(_PARTS):
        own = [span for span in drawn if _part(span) == part]
        if own:
            traces.append({
                "type": "bar",
                "orientation": "h",
                "name": part,
                "meta": part,
                "y": [lanes.index(span.lane) for span in own],
                "x": [(span.end - max(span.start, begin)) / 1e6 for span in own],
                "base": [(max(span.start, begin) - begin) / 1e6 for span in own],
                "text": [label(span.name, 40) for span in own],
                "textposition": "none",
                "width": 0.8 if part != "wait" else 0.35,
                "marker": {"color": COLORS[at % len(COLORS)], "line": {"width": 0}},
                "hovertemplate": "%{text}: %{x:.4g} ms from %{base:.4g} ms<extra></extra>",
            })  # fmt: skip
    end = max(span.end for span in drawn)
    notes = []
    if len(drawn) < len(ordered):
        notes.append(f"The first {len(drawn)} of {len(ordered)} spans are drawn.")
    rows = [
        [lane, part, str(len(own)), number(sum(own) / 1e6)] for (lane, part), own in busy.items()
    ]
    return Figure(
        name=name,
        title=title,
        alt=(
            f"What occupied each of {len(lanes)} lanes in the first {tokens} decoded tokens, "
            f"{number((end - begin) / 1e6)} ms, of {title}."
        ),
        traces=traces,
        layout={
            "barmode": "overlay",
            "height": 190 + 44 * len(lanes),
            "xaxis": {"title": {"text": "modelled ms since the first decode step"}},
            "yaxis": {
                "tickvals": list(range(len(lanes))),
                "ticktext": [label(lane, 18) for lane in lanes],
                "autorange": "reversed",
                "showgrid": False,
            },
        },
        table=Table("Busy time by lane", ["lane", "what", "spans", "ms"], sorted(rows)),
        notes=notes,
    )


def _part(span: Span) -> str:
    cause = span.info.get("cause")
    if cause is not None:
        return f"{cause} copy" if f"{cause} copy" in _PARTS else "other"
    return span.name if span.name in _PARTS else "other"


def _order(lane: str) -> tuple[int, str]:
    return ({"compute": 0, "cpu": 1}.get(lane, 2), lane)
