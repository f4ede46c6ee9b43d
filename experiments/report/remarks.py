"""This module gathers what points say of themselves: warnings, assumptions, what was measured."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moetier.experiments.report.folder import Folder

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


@dataclass(frozen=True)
class Remark:
    """What was said, by how many points, and in how many other numbers."""

    text: str
    points: int
    variants: int = 1


def grouped(said: Iterable[Sequence[str]]) -> list[Remark]:
    """Return what the points *said*, each a list of texts; texts that differ in numbers are one."""
    points: Counter[str] = Counter()
    texts: dict[str, dict[str, None]] = {}
    for one in said:
        for kind in dict.fromkeys(_NUMBER.sub("#", text) for text in one):
            points[kind] += 1
        for text in one:
            texts.setdefault(_NUMBER.sub("#", text), {})[text] = None
    return [
        Remark(next(iter(texts[kind])), count, len(texts[kind]))
        for kind, count in points.most_common()
    ]


def warnings_of(folder: Folder) -> tuple[list[Remark], list[str]]:
    """Return what points warn of, and what only the sweep as a whole shows."""
    remarks = grouped(_texts(entry.outcome, "warnings") for entry in folder.entries)
    known = {text for entry in folder.entries for text in _texts(entry.outcome, "warnings")}
    whole = [
        text
        for text in _texts(folder.provenance, "warnings")
        if not any(text.startswith(one) for one in known)
    ]
    return remarks, whole


def limitations_of(folder: Folder) -> list[Remark]:
    """Return what the points assumed; a validation's assumptions hold for all of its points."""
    said = [_texts(entry.outcome, "known_limitations") for entry in folder.entries]
    remarks = grouped(said)
    known = {_NUMBER.sub("#", remark.text) for remark in remarks}
    whole = _texts(folder.provenance, "known_limitations")
    for_all = [text for text in whole if _NUMBER.sub("#", text) not in known]
    remarks += [Remark(text, 0) for text in for_all]
    if folder.validation is not None:
        told = _texts(folder.validation, "known_limitations")
        remarks += [Remark(one.text, 0, one.variants) for one in grouped([told])]
    return remarks


def measured_or_modelled(folder: Folder) -> str:
    """Return in a sentence whether the points' times were measured; empty for a validation."""
    if folder.kind == "validate":
        return ""
    real = sum(_on_real_machine(entry.outcome) for entry in folder.entries)
    if not real:
        return "Times and energy are modelled."
    if real == len(folder.entries):
        return "Times are measured, energy is modelled."
    return (
        f"Times are measured for {real} of {len(folder.entries)} points and modelled for the "
        "others; energy is modelled."
    )


def _on_real_machine(outcome: Mapping[str, Any]) -> bool:
    machine = (outcome.get("config") or {}).get("machine") or {}
    return bool(machine.get("kind", "simulated") != "simulated")


def _texts(found: Mapping[str, Any], key: str) -> list[str]:
    return [str(text) for text in found.get(key) or []]
