"""This module says where a report's figures come from: versions, routing, machines, contents."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moetier.experiments.config import load_hardware
from moetier.experiments.report.figure import Table
from moetier.experiments.report.folder import Folder
from moetier.experiments.store import SEARCH, SWEEP
from moetier.traces.errors import InputError

_CONFIGS = (SWEEP, SEARCH, "config.yaml")


def facts(folder: Folder) -> list[tuple[str, str]]:
    """Return names and values: the command, date, versions, config hash, trace identities."""
    found = [
        ("written by", f"moetier {folder.kind}"),
        ("results of", folder.written.strftime("%Y-%m-%d %H:%M UTC")),
        ("folder", folder.path.resolve().name),
    ]
    versions = folder.provenance.get("versions")
    if isinstance(versions, dict):
        found.append(("versions", ", ".join(f"{name} {text}" for name, text in versions.items())))
    own = sorted({
        str(text)
        for entry in folder.entries
        if (text := (entry.outcome.get("provenance") or {}).get("moetier"))
    })  # fmt: skip
    if own:
        found.append(("moetier of the points", ", ".join(own)))
    for name in _CONFIGS:
        file = folder.path / name
        if file.is_file():
            found.append((f"SHA-256 of {name}", _sha256(file)))
    sources = dict[str, str]()
    for entry in folder.entries:
        identity = (entry.outcome.get("provenance") or {}).get("source")
        if identity:
            sources.setdefault(str(identity), str(entry.axes.get("source")))
    found += [(f"routing of {name}", identity) for identity, name in sources.items()]
    if folder.validation is not None:
        identity = folder.validation.get("identity") or {}
        found += [(f"measured on: {name}", str(value)) for name, value in identity.items()]
    return found


def keys_of(folder: Folder) -> str:
    """Return one SHA-256 of all content keys, in order; equal for equal sweeps."""
    return hashlib.sha256("\n".join(entry.key for entry in folder.entries).encode()).hexdigest()


def hardware_sources(folder: Folder) -> list[Table]:
    """Return for each machine where the numbers of its profile come from, as they stand today."""
    found = []
    for name in dict.fromkeys(str(entry.axes.get("hardware")) for entry in folder.entries):
        try:
            data = load_hardware(name).model_dump(mode="json")
        except InputError:
            found.append(Table(name, ["block", "source"], [["profile", "not found today"]]))
            continue
        found.append(Table(name, ["block", "source"], [list(row) for row in _sources(data)]))
    if folder.profile is not None:
        name = str(folder.profile.get("name"))
        rows = [list(row) for row in _sources(folder.profile)]
        found.append(Table(name, ["block", "source"], rows))
    return found


def _sources(data: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield every `source` in *data*, with the block that it stands in."""
    if isinstance(data, dict):
        if isinstance(data.get("source"), str):
            yield place or "profile", " ".join(data["source"].split())
        for key, value in data.items():
            yield from _sources(value, f"{place}.{key}" if place else str(key))
    elif isinstance(data, list):
        for at, value in enumerate(data):
            yield from _sources(value, f"{place}[{at}]")


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
