"""This module reads prompt files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from moetier.traces.errors import InputError


def read_prompts(path: str | Path) -> list[str]:
    """Return the prompts in *path*: `.txt`, one a line, or `.jsonl`, `{"prompt": ...}` a line.

    Blank lines are skipped; other keys of a JSON line are ignored. Raises `InputError` with the
    file and line for anything that is not a prompt, and for a file without any.
    """
    file = Path(path)
    if file.suffix not in (".txt", ".jsonl"):
        raise InputError(
            f"prompts in a '{file.suffix}' file", where=file, way_out="use .txt or .jsonl"
        )
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"cannot be read: {error.strerror}", where=file, way_out="check --prompts"
        ) from None
    except UnicodeDecodeError as error:
        line = file.read_bytes()[: error.start].count(b"\n") + 1
        raise InputError(
            "is not UTF-8", where=f"{file}:{line}", way_out="save the file as UTF-8"
        ) from None
    parse = _plain if file.suffix == ".txt" else _json
    lines = enumerate(text.split("\n"), start=1)  # a prompt may hold other separators
    prompts = [parse(line, f"{file}:{number}") for number, line in lines if line.strip()]
    if not prompts:
        raise InputError("holds no prompt", where=file, way_out="write one prompt a line")
    return prompts


def prompts_sha256(prompts: Sequence[str]) -> str:
    """Return a hash of *prompts* and their order, which a trace records instead of the text."""
    return hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()


def _plain(line: str, where: str) -> str:
    del where
    return line.rstrip("\r")


def _json(line: str, where: str) -> str:
    way_out = 'write {"prompt": "..."}'
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"is not JSON: {error.msg}", where=where, way_out=way_out) from None
    prompt = value.get("prompt") if isinstance(value, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        found = "no 'prompt'" if prompt is None else f"a 'prompt' of {prompt!r}"
        raise InputError(f"has {found}", where=where, way_out=way_out)
    return prompt
