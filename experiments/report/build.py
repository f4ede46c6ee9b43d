"""This module makes a report: it reads a folder, gathers the sections, and writes the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moetier.experiments.headroom import rows_of
from moetier.experiments.report.breakdown import breakdowns
from moetier.experiments.report.choice import differing, on_front, some, title_of
from moetier.experiments.report.curves import hit_curves
from moetier.experiments.report.figure import Figure, Table, number, percent
from moetier.experiments.report.folder import Entry, Folder, read_folder
from moetier.experiments.report.measured import measured, remarks, summary
from moetier.experiments.report.page import render
from moetier.experiments.report.payload import pack
from moetier.experiments.report.provenance import facts, hardware_sources, keys_of
from moetier.experiments.report.remarks import limitations_of, measured_or_modelled, warnings_of
from moetier.experiments.report.static import FIGURES, draw_static
from moetier.experiments.report.timelines import timeline
from moetier.experiments.store import write_text
from moetier.traces.errors import InputError

REPORT = "report.html"
MAX_BARS = 24
TIMELINES = 3


@dataclass(frozen=True)
class Written:
    """What a report came to: its file, the figures beside it, and what could not be drawn."""

    page: Path
    figures: list[Path]
    problems: list[str]


@dataclass(frozen=True)
class Sections:
    """Everything that the page shows, ready for its template."""

    folder: Folder
    data: dict[str, Any]
    where: list[Figure] = field(default_factory=list)  # time and energy go
    hits: Figure | None = None
    timelines: list[Figure] = field(default_factory=list)
    untimed: list[str] = field(default_factory=list)  # points without a timeline, and why
    measured: Figure | None = None
    measured_summary: str = ""
    measured_remarks: list[str] = field(default_factory=list)
    headroom: Table | None = None

    @property
    def figures(self) -> list[Figure]:
        """Return all figures that are drawn from a spec."""
        own = [self.hits, self.measured]
        return [*self.where, *self.timelines, *(one for one in own if one is not None)]


def write_report(
    path: Path,
    out: Path | None = None,
    *,
    timelines: int = TIMELINES,
    timeline_of: Sequence[str] = (),
    static: bool = True,
) -> Written:
    """Write the report of the results in the folder *path* to the file *out*.

    *out* defaults to report.html in the folder, *timelines* says how many points are simulated
    again, *timeline_of* names some by the beginnings of their content keys, which come first, and
    *static* says whether figures are also drawn as PNG and PDF, in `figures/` beside it.

    Raises:
        InputError: If the folder holds no results, no point has a key of *timeline_of*, or the page
            cannot be written.
    """
    folder = read_folder(path)
    target = out if out is not None else path / REPORT
    data = pack(folder)
    done = folder.done
    front = _best(folder, data)
    wanted = [_named(done, key) for key in timeline_of]
    chosen = [*wanted, *(at for at in some(len(done), front, timelines) if at not in wanted)]
    sections = _sections(folder, data, front, chosen[: max(timelines, len(wanted))])
    write_text(target, render(_context(sections)))
    figures: list[Path] = []
    problems: list[str] = []
    if static:
        bars = [done[at] for at in some(len(done), front, MAX_BARS)]
        place = target.parent / FIGURES
        figures, problems = draw_static(folder, bars, data["x"], data["y"], place)
    return Written(target, figures, problems)


def _best(folder: Folder, data: dict[str, Any]) -> list[int]:
    """Return the numbers of the points that are done and come first where not all are shown.

    Those are the front of a search in all of its objectives, what it recommends before the others;
    else the front of the first figure.
    """
    done = folder.done
    found = [at for at, entry in enumerate(done) if entry.metrics.get("on_front") is True]
    if found and data["recommended"] is not None:
        best = folder.entries[data["recommended"]]
        return sorted(found, key=lambda at: done[at] is not best)
    return found or (on_front(done, data["x"], data["y"]) if data["x"] else [])


def _named(done: list[Entry], key: str) -> int:
    """Return the number of the first point that is done whose content key begins with *key*."""
    for at, entry in enumerate(done):
        if key and entry.key.startswith(key):
            return at
    raise InputError(
        f"no point that is done has a content key beginning with '{key}'",
        where="--timeline-of",
        way_out="a report shows the key of the chosen point",
    )


def _sections(
    folder: Folder, data: dict[str, Any], front: list[int], timed: Sequence[int]
) -> Sections:
    done = folder.done
    drawn, untimed = _timelines(done, timed)
    place = {id(entry): at for at, entry in enumerate(folder.entries)}
    named = [[place[id(done[at])], one.name] for at, one in drawn.items()]
    found = folder.validation
    return Sections(
        folder=folder,
        data=data | {"timelines": named},
        where=breakdowns([done[at] for at in some(len(done), front, MAX_BARS)], len(done)),
        hits=hit_curves(done),
        timelines=list(drawn.values()),
        untimed=untimed,
        measured=None if found is None else measured(found),
        measured_summary="" if found is None else summary(found),
        measured_remarks=[] if found is None else remarks(found),
        headroom=_headroom(folder),
    )


def _timelines(done: list[Entry], timed: Sequence[int]) -> tuple[dict[int, Figure], list[str]]:
    """Return the timelines of the points numbered *timed*, and why some have none."""
    names = differing(done)
    figures: dict[int, Figure] = {}
    reasons: dict[str, int] = {}
    for at in timed:
        title = title_of(done[at], names)
        try:
            figures[at] = timeline(done[at], title, f"timeline-{len(figures) + 1}")
        except InputError as error:
            reasons[error.problem] = reasons.get(error.problem, 0) + 1
    counted = [f"{reason} ({n} point{'s' * (n > 1)})" for reason, n in reasons.items()]
    return figures, counted


def _headroom(folder: Folder) -> Table | None:
    if folder.headroom is None:
        return None
    rows = [
        [
            str(row[""]), number(row["tpot_ms"]), percent(row["miss_rate"], 2),
            percent(row["left_to_win"]), str(row["about"]),
        ]
        for row in rows_of(folder.headroom)
    ]  # fmt: skip
    head = ["bound", "TPOT (ms)", "miss rate", "time left to win", "about"]
    return Table("What is left to win", head, rows)


def _context(sections: Sections) -> dict[str, Any]:
    """Return what the template reads."""
    folder = sections.folder
    warnings, whole = warnings_of(folder)
    failed: dict[str, int] = {}
    for entry in folder.entries:
        if not entry.done:
            reason = entry.error or "no reason is known"
            failed[reason] = failed.get(reason, 0) + 1
    return {
        "folder": folder,
        "s": sections,
        "data_x": sections.data["x"],
        "left_out": sections.data["left_out"],
        "failed": failed,
        "n_failed": sum(failed.values()),
        "warnings": warnings,
        "whole_warnings": whole,
        "limitations": limitations_of(folder),
        "modelled": measured_or_modelled(folder),
        "facts": facts(folder),
        "keys": keys_of(folder) if folder.entries and folder.kind != "simulate" else "",
        "hardware": hardware_sources(folder),
        "data": sections.data | {"figures": {one.name: one.spec() for one in sections.figures}},
    }
