"""This module sets values in nested mappings by dotted keys, as `--set` and sweeps do."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import yaml

from moetier.traces.errors import InputError


def set_key(data: dict[str, Any], key: str, value: Any) -> None:
    """Set the dotted *key* of *data*, making mappings on the way.

    A name on the way becomes a mapping: `policy: belady` and `policy.warmup` give
    `{preset: belady, warmup: ...}`.

    Raises:
        InputError: If the key is empty, or leads through something that is not a mapping.
    """
    *path, last = key.split(".")
    if not all([*path, last]):
        raise InputError(f"'{key}' is not a key", way_out="write keys as a.b.c")
    at: dict[str, Any] = data
    for depth, part in enumerate(path):
        inner: Any = at.setdefault(part, {})
        if part == "policy" and isinstance(inner, str):
            inner = at[part] = {"preset": inner}
        if inner is None:
            inner = at[part] = {}
        if not isinstance(inner, dict):
            here = ".".join(path[: depth + 1])
            raise InputError(
                f"'{key}' leads into '{here}', which is {inner!r}",
                way_out=f"set '{here}' itself, or give it a mapping",
            )
        at = inner
    at[last] = value


def apply_overrides(data: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return a copy of *data* with texts such as `capacity.dram=25 %` applied in order."""
    result = copy.deepcopy(data)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise InputError(
                f"'{text}' has no value", where="--set", way_out="write --set key=value"
            )
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError:
            raise InputError(f"'{value}' is not valid YAML", where=f"--set {key}") from None
        try:
            set_key(result, key.strip(), parsed)
        except InputError as error:
            raise InputError(error.problem, where="--set", way_out=error.way_out) from None
    return result
