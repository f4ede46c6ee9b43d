"""This module defines the one error that bad input raises."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class InputError(ValueError):
    """Input that cannot be used: says where, what was found and the way out.

    The command line prints the message and exits with status 2; it never prints a traceback for it.
    """

    def __init__(self, problem: str, *, where: str | Path | None = None, way_out: str = "") -> None:
        """Describe *problem* found at *where* (a file, key or line) and the *way_out*."""
        self.problem, self.where, self.way_out = problem, where, way_out
        text = f"{where}: {problem}" if where is not None else problem
        super().__init__(f"{text}; {way_out}" if way_out else text)

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild from the parts, so that the error survives a trip between processes."""
        return _rebuild, (self.problem, self.where, self.way_out)


def nearest(name: object, known: Iterable[str]) -> str:
    """Return "did you mean 'x'? " for the *known* name most like *name*, or nothing."""
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.65)
    return f"did you mean '{near[0]}'? " if near else ""


def _rebuild(problem: str, where: str | Path | None, way_out: str) -> InputError:
    return InputError(problem, where=where, way_out=way_out)
