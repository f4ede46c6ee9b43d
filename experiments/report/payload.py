"""This module packs the points of a report for its page: columns, and each text only once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import yaml

from moetier.experiments.report.choice import contends
from moetier.experiments.report.columns import about, default_axes, metric_names, numeric
from moetier.experiments.report.folder import Entry, Folder
from moetier.experiments.report.palette import COLORS, SYMBOLS

MAX_HUES = 14
"""Values of a column that points can still be told apart by."""

DIGITS = 8
"""Significant digits of a figure on the page; the folder has all."""


class Texts:
    """A list of texts in which each stands once."""

    def __init__(self) -> None:
        """Begin with none."""
        self.all: list[str] = []
        self._at: dict[str, int] = {}

    def at(self, text: str) -> int:
        """Return the place of *text*, adding it at first sight."""
        if text not in self._at:
            self._at[text] = len(self.all)
            self.all.append(text)
        return self._at[text]


def pack(folder: Folder) -> dict[str, Any]:
    """Return the points of *folder* as plain values for the page, one list per column."""
    entries = folder.entries
    names, left_out = metric_names(folder)
    axes = numeric(names, [entry.metrics for entry in entries])
    chosen = list(dict.fromkeys(name for entry in entries for name in entry.axes))
    yamls, warnings = Texts(), Texts()
    done = [entry for entry in entries if entry.done]
    return {
        "n": len(entries),
        "key_name": "content key" if folder.kind != "simulate" else "fingerprint of the records",
        "keys": [entry.key for entry in entries],
        "status": _column([entry.status for entry in entries]),
        "errors": _column([entry.error for entry in entries]),
        "axes": [
            {"name": name, **_column([text(entry.axes.get(name)) for entry in entries])}
            for name in chosen
        ],
        "metrics": [_metric(name, entries, name in axes) for name in names],
        "left_out": left_out,
        "x": default_axes(folder, axes)[0] if axes and done else None,
        "y": default_axes(folder, axes)[1] if axes and done else None,
        "hues": hues(chosen, entries),
        "verbs": _column([_verb(entry) for entry in entries]),
        "yaml": [[yamls.at(block) for block in yaml_blocks(entry)] for entry in entries],
        "yaml_texts": yamls.all,
        "warnings": [
            [warnings.at(str(item)) for item in entry.outcome.get("warnings") or []]
            for entry in entries
        ],
        "warning_texts": warnings.all,
        "apart": [at for at, entry in enumerate(entries) if entry.done and not contends(entry)],
        "colors": COLORS,
        "symbols": SYMBOLS,
        "recommended": _recommended(folder),
        "file": _file(folder),
    }


def hues(chosen: Sequence[str], entries: Sequence[Entry]) -> list[str]:
    """Return the columns of the config by which points may be coloured, the best first."""
    counts = {name: len({text(entry.axes.get(name)) for entry in entries}) for name in chosen}
    return [name for name in chosen if 1 < counts[name] <= MAX_HUES]


def text(value: Any) -> str | None:
    """Return a value of the config as a label."""
    return None if value is None else str(value)


def yaml_blocks(entry: Entry) -> list[str]:
    """Return the resolved config of *entry* as YAML, a text per key; empty where it is unknown.

    Null keys are left out: reading the rest back gives the same run.
    """
    config = entry.outcome.get("config")
    if not isinstance(config, dict):
        return []
    shown = {key: value for key, value in config.items() if value is not None}
    if isinstance(shown.get("policy"), dict):
        shown["policy"] = {"name": entry.policy, **shown["policy"]}
    return [_block(json.dumps({key: value})) for key, value in shown.items()]


@lru_cache(maxsize=1 << 16)
def _block(content: str) -> str:
    """Return the YAML of the JSON *content*; ten thousand points have few different blocks."""
    text: str = yaml.safe_dump(json.loads(content), sort_keys=False, allow_unicode=True, width=100)
    return text


def _metric(name: str, entries: Sequence[Entry], is_axis: bool) -> dict[str, Any]:
    known = about(name)
    return {
        "name": name,
        "label": known.label,
        "unit": known.unit,
        "scale": known.scale,
        "better": known.better,
        "per": known.per,
        "error": known.error,
        "axis": is_axis,
        **_column([short(entry.metrics.get(name)) for entry in entries]),
    }


def short(value: Any) -> Any:
    """Return a float with `DIGITS` significant digits, anything else as it is."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _column(values: list[Any]) -> dict[str, Any]:
    """Return *values* as a list, as one value, or as a table of few and places in it."""
    if not values or all(value == values[0] for value in values[1:]):
        return {"same": values[0] if values else None}
    if isinstance(next(value for value in values if value is not None), str):
        texts = list(dict.fromkeys(values))
        at = {value: number for number, value in enumerate(texts)}
        return {"texts": texts, "at": [at[value] for value in values]}
    return {"values": values}


def _verb(entry: Entry) -> str:
    config: Mapping[str, Any] = entry.outcome.get("config") or {}
    return "simulate" if config.get("live") is None else "evaluate"


def _recommended(folder: Folder) -> int | None:
    """Return which point a search recommends: the one of the front with the recommended config."""
    if folder.recommended is None:
        return None
    try:
        told = yaml.safe_load(folder.recommended)
    except yaml.YAMLError:  # edited by hand: the page shows it all the same
        return None
    if not isinstance(told, dict):
        return None
    for at, entry in enumerate(folder.entries):
        config = entry.outcome.get("config")
        if entry.metrics.get("on_front") and config and _same(told, config):
            return at
    return None


def _same(told: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    policy = {key: value for key, value in told.get("policy", {}).items() if key != "name"}
    rest = ("hardware", "capacity", "overlap", "seed", "weights")
    return policy == config.get("policy") and all(
        told.get(key) == config.get(key) or (key == "weights" and told.get(key) is None)
        for key in rest
    )


def _file(folder: Folder) -> str:
    """Return the first part of a file name for a point of *folder*."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in folder.name)
    return kept.strip("-.") or "point"
