"""This module finds the files a config names, and says where a problem was found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from moetier.traces.errors import InputError


def find_file(text: str | Path) -> Path:
    """Return the file *text*, looked for from the current directory, then among the package's own.

    So `traces/samples/moe-tiny.parquet` and `experiments/configs/quickstart.yaml` work from
    anywhere. Raises `InputError` when there is no such file.
    """
    path = Path(text)
    if path.exists():
        return path
    if not path.is_absolute():
        packaged = Path(str(files("moetier"))) / path
        if packaged.exists():
            return packaged
    raise InputError(
        "no such file",
        where=text,
        way_out="paths go from the current directory, then from the package's own files",
    )


@contextmanager
def inside(where: str | Path) -> Iterator[None]:
    """Add *where* in front of the place that an `InputError` names."""
    try:
        yield
    except InputError as error:
        place = str(where) if error.where is None else f"{where}: {error.where}"
        raise InputError(error.problem, where=place, way_out=error.way_out) from None
