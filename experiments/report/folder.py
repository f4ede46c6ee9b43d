"""This module reads a folder of results: what made it, its points, and what stands beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from moetier.experiments.config import policy_label
from moetier.experiments.findings import flatten
from moetier.experiments.search import RECOMMENDED
from moetier.experiments.store import RESULTS, SEARCH, SWEEP, Store
from moetier.sim.policy.seams import DEFAULTS
from moetier.traces.errors import InputError

RESULT = "result.json"
VALIDATION = "validation.json"
PROFILE = "profile.yaml"
PROVENANCE = "provenance.json"

_ASIDE = ("status", "error", "warnings", "key")
"""Columns of results that are no metrics."""

_WRITTEN_BY = {
    "search": SEARCH, "sweep": RESULTS, "simulate": RESULT, "validate": VALIDATION,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One point: what was chosen for it, what came of it, and all that its result says.

    *outcome* is the point's own file (`config`, `warnings`, `known_limitations`, `provenance`);
    empty where that is not there.
    """

    key: str
    status: str
    error: str | None
    axes: dict[str, Any]
    metrics: dict[str, Any]
    outcome: Mapping[str, Any]

    @property
    def done(self) -> bool:
        """Return whether the point has metrics."""
        return self.status == "done"

    @property
    def policy(self) -> str:
        """Return the policy's name."""
        return str(self.axes.get("policy", "policy"))


@dataclass(frozen=True)
class Folder:
    """What a folder of results holds; *notes* say what of it is missing or cannot be read."""

    path: Path
    kind: str  # the command that wrote it
    name: str
    written: datetime  # when its results were
    entries: list[Entry] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)  # of the sweep or search
    provenance: dict[str, Any] = field(default_factory=dict)
    validation: dict[str, Any] | None = None
    profile: dict[str, Any] | None = None  # that a validation measured
    recommended: str | None = None  # YAML
    headroom: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def done(self) -> list[Entry]:
        """Return the points that have metrics."""
        return [entry for entry in self.entries if entry.done]


def read_folder(path: Path) -> Folder:
    """Return what the folder *path* holds.

    Raises:
        InputError: If it is no folder, holds no results, or holds some that cannot be read.
    """
    if not path.is_dir():
        raise InputError("is no folder", where=path, way_out="name a folder of results")
    kind, main = _kind(path)
    notes: list[str] = []
    entries: list[Entry] = []
    about: dict[str, Any] = {}
    if kind in ("sweep", "search"):
        entries = _gathered(path, notes) if main.is_file() else []
        entries += _ungathered(path, {entry.key for entry in entries}, main.is_file(), notes)
        about = _mapping(path / (SEARCH if kind == "search" else SWEEP))
    if kind == "simulate":
        entries = [_single(main)]
    validation = _json(path / VALIDATION) if (path / VALIDATION).is_file() else None
    if validation is not None and not _is_points(validation.get("points")):
        raise InputError(
            "holds no list of points",
            where=path / VALIDATION,
            way_out="run `moetier validate` again",
        )
    recommended = path / RECOMMENDED
    return Folder(
        path=path,
        kind=kind,
        name=str(about.get("name") or (validation or {}).get("name") or path.resolve().name),
        written=datetime.fromtimestamp(main.stat().st_mtime, UTC),
        entries=entries,
        config=about,
        provenance=_json(path / PROVENANCE) if (path / PROVENANCE).is_file() else {},
        validation=validation,
        profile=_mapping(path / PROFILE) or None,
        recommended=_text(recommended) if recommended.is_file() else None,
        headroom=entries[0].outcome.get("headroom") if kind == "simulate" else None,
        notes=notes,
    )


def _is_points(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(point, dict) for point in value)


def _kind(path: Path) -> tuple[str, Path]:
    """Return which command wrote the folder, and the file that says so."""
    for kind, name in _WRITTEN_BY.items():
        if (path / name).is_file():
            gathered = path / RESULTS
            return kind, gathered if kind == "search" and gathered.is_file() else path / name
    if any((path / "points").glob("*.json")):  # a sweep that was stopped before its end
        return "sweep", path / "points"
    raise InputError(
        "holds no results",
        where=path,
        way_out="name a folder that `moetier sweep`, `search`, `validate` or `simulate` wrote",
    )


def _gathered(path: Path, notes: list[str]) -> list[Entry]:
    """Return a point per row of the gathered results."""
    try:
        table = Store(path).results()
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"cannot be read: {error}", where=path / RESULTS, way_out="run the sweep again"
        ) from None
    names = [str(name) for name in table.columns]
    if not {"status", "key"} <= set(names):
        raise InputError(
            "is no table of a sweep's results",
            where=path / RESULTS,
            way_out="run `moetier sweep` again",
        )
    chosen = names[: names.index("status")]
    measured = [name for name in names[len(chosen) :] if name not in _ASIDE]
    store, entries, lost = Store(path), [], 0
    for row in table.to_dict("records"):
        key = str(row["key"])
        outcome = store.point(key) or {}
        lost += not outcome
        reason = plain(row.get("error"))
        entries.append(
            Entry(
                key,
                str(row["status"]),
                None if reason is None else str(reason),
                {name: plain(row[name]) for name in chosen},
                {name: plain(row[name]) for name in measured},
                outcome,
            )
        )
    if lost:
        notes.append(
            f"The files of {lost} of {len(entries)} points are not in the folder: their configs, "
            "warnings and assumptions are unknown."
        )
    return entries


def _ungathered(path: Path, known: set[str], gathered: bool, notes: list[str]) -> list[Entry]:
    """Return the points that lie in the folder but in no table: the sweep was stopped."""
    store, entries, broken = Store(path), [], 0
    for file in sorted((path / "points").glob("*.json")):
        if file.stem in known:
            continue
        found = store.point(file.stem)
        if found is None:
            broken += 1
        elif not gathered or found.get("status") == "done":
            entries.append(_entry(file.stem, found))
    if broken:
        notes.append(f"{broken} files in points/ cannot be read and are left out.")
    if gathered and entries:
        notes.append(
            f"{len(entries)} points in points/ are of an earlier or unfinished sweep and not in "
            f"{RESULTS}; they are left out."
        )
        return []
    if not gathered:
        notes.append(
            f"The sweep was stopped before its end: these are the {len(entries)} points that it "
            "left, without their place in the sweep. `moetier sweep` goes on where it stopped."
        )
    return entries


def _single(file: Path) -> Entry:
    """Return the point of a folder that `simulate --out` wrote."""
    found = _json(file)
    if not isinstance(found.get("config"), dict):
        raise InputError("holds no run", where=file, way_out="run `moetier simulate --out` again")
    key = str((found.get("provenance") or {}).get("records") or "run")[:20]
    return _entry(key, {"status": "done", **found})


def _entry(key: str, found: Mapping[str, Any]) -> Entry:
    """Return the point whose file says *found*, described by its resolved config alone."""
    config = found.get("config")
    config = config if isinstance(config, dict) else {}
    policy = config.get("policy")
    seams = policy.items() if isinstance(policy, dict) else ()
    told = {seam: part for seam, part in seams if part != DEFAULTS.get(seam)}
    source = config.get("trace") or config.get("live")
    if source is None:
        source = (config.get("synthetic") or {}).get("geometry")
    axes = {
        "policy": policy_label(told) if told else "on-demand",
        "hardware": config.get("hardware"),
        "source": source,
        **{f"capacity.{tier}": size for tier, size in (config.get("capacity") or {}).items()},
    }
    metrics = {
        name: plain(value)
        for name, value in flatten(found).items()
        if name not in _ASIDE and not name.startswith("headroom.")
    }
    error = found.get("error")
    status = str(found.get("status"))
    return Entry(key, status, error and str(error), axes, metrics, found)


def plain(value: Any) -> Any:
    """Return *value* as JSON can hold it: numpy's numbers as Python's, NaN as None.

    Of a mean with its standard error and number, as accuracies by task are, the mean is kept.
    """
    if isinstance(value, dict):
        value = value.get("mean")
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return None if str(value) in ("NaT", "<NA>") else str(value)


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot be read: {error}", where=file, way_out="write it again") from None
    if not isinstance(found, dict):
        raise InputError(
            f"expected a mapping, got {type(found).__name__}", where=file, way_out="write it again"
        )
    for key in ("warnings", "known_limitations"):
        if not isinstance(found.get(key) or [], list):
            raise InputError(f"'{key}' is no list", where=file, way_out="write it again")
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read: {error}", where=file, way_out="write it again") from None


def _mapping(file: Path) -> dict[str, Any]:
    """Return the mapping of the YAML *file*; empty where there is no such file."""
    if not file.is_file():
        return {}
    try:
        found = yaml.safe_load(_text(file))
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(f"is no YAML: {error}", where=file, way_out="write it again") from None
    return found if isinstance(found, dict) else {}
