"""This module keeps results on disk; every file appears whole or not at all."""

from __future__ import annotations

import json
import math
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

import moetier
from moetier.traces.errors import InputError
from moetier.traces.files import is_abandoned, replacing

if TYPE_CHECKING:
    import pandas as pd

RESULTS = "results.parquet"
SWEEP = "sweep.yaml"
SEARCH = "search.yaml"
_LIBRARIES = ("numpy", "pandas", "pyarrow", "pydantic", "simpy")


def dump_json(value: Any) -> str:
    """Return *value* as JSON; what is not a number (NaN, infinite) becomes null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def write_text(path: Path, text: str) -> None:
    """Write *text* to *path*, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_yaml(path: Path, value: Any) -> None:
    """Write *value* to *path* as YAML, in the order given."""
    write_text(path, yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100))


def write_run(out: Path, result: dict[str, Any]) -> None:
    """Write one run's result and its resolved config to the folder *out*."""
    write_text(out / "result.json", dump_json(result) + "\n")
    write_yaml(out / "config.yaml", result["config"])


def versions() -> dict[str, str]:
    """Return the versions of what produced a result."""
    found = {"moetier": moetier.__version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


class Store:
    """The folder of a sweep: `points/KEY.json`, `records/KEY.parquet`, and the gathered results."""

    def __init__(self, folder: Path) -> None:
        """Use *folder*, which need not exist yet."""
        self.folder = folder

    def refuse(self, name: str, what: str) -> None:
        """Raise `InputError` where the file *name* says that the folder holds *what*."""
        if (self.folder / name).exists():
            raise InputError(f"holds {what}", where=self.folder, way_out="use another --out")

    def create(self) -> None:
        """Make the folders."""
        try:
            for name in ("points", "records"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
                _sweep_up(self.folder / name)
        except OSError as error:
            raise InputError(
                f"cannot be made: {error.strerror}", where=self.folder, way_out="use another --out"
            ) from None

    def point(self, key: str) -> dict[str, Any] | None:
        """Return the stored outcome of the point *key*, None where there is none to trust."""
        path = self.folder / "points" / f"{key}.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_interned)
        except (OSError, ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) and found.get("key") == key else None

    def put(self, key: str, outcome: dict[str, Any]) -> None:
        """Store the *outcome* of the point *key*, replacing an earlier one."""
        write_text(self.folder / "points" / f"{key}.json", dump_json(outcome) + "\n")

    def records(self, key: str) -> Path:
        """Return where the records of the point *key* go."""
        return self.folder / "records" / f"{key}.parquet"

    def gather(self, rows: list[dict[str, Any]]) -> None:
        """Write *rows* as results.parquet and results.csv, a column per key."""
        import pandas as pd

        for name in ("points", "records"):
            _sweep_up(self.folder / name)
        table = pd.DataFrame(_columns(rows))
        with replacing(self.folder / RESULTS) as temporary:
            table.to_parquet(temporary, index=False)
        with replacing(self.folder / "results.csv") as temporary:
            table.to_csv(temporary, index=False, lineterminator="\n")

    def results(self) -> pd.DataFrame:
        """Return the gathered results; raise `InputError` where there are none."""
        import pandas as pd

        path = self.folder / RESULTS
        if not path.is_file():
            raise InputError(
                f"has no {RESULTS}", where=self.folder, way_out="run `moetier sweep` first"
            )
        return pd.read_parquet(path)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield *folder*, made if need be, and gone again if an error leaves it empty."""
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot be made: {error.strerror}", where=folder, way_out="name another folder"
        ) from None
    try:
        yield folder
    finally:
        if made and not any(folder.iterdir()):
            folder.rmdir()


def _sweep_up(folder: Path) -> None:
    """Remove the temporary files that processes left which are no more."""
    for path in folder.glob(".*.tmp"):
        if is_abandoned(path):
            path.unlink(missing_ok=True)


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return *rows* by column; one that mixes text and other values is text throughout."""
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        if len({isinstance(value, str) for value in values if value is not None}) > 1:
            values = [None if value is None else str(value) for value in values]
        columns[name] = values
    return columns


def _interned(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a mapping of *pairs*; ten thousand outcomes share their keys, and one copy of them."""
    return {sys.intern(key): value for key, value in pairs}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
