"""Fixtures shared by the tests of the documentation."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

LINE = re.compile(r"^(?:    )?(?:\$ )?(?:[A-Z_]+=\S+ )*moetier (?!answers)(.+)$", re.MULTILINE)


@pytest.fixture(scope="session")
def commands_of() -> Callable[[Path], list[list[str]]]:
    """Return a function that finds a page's lines with a command, as the words after `moetier`."""

    def find(page: Path) -> list[list[str]]:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        return [shlex.split(line, comments=True) for line in LINE.findall(text)]

    return find
