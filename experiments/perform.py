"""This module runs points: in this process, in several, or on a cluster that exists.

joblib hands the points out. Whatever a point comes to is stored by whoever ran it, under the key of
its content; so a worker that dies takes at most the points with it that it was running, and those
are run again.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any, Literal

from moetier.experiments.live_runs import run_live
from moetier.experiments.points import Point
from moetier.experiments.runs import run
from moetier.experiments.store import Store
from moetier.traces.errors import InputError
from moetier.traces.files import DiskFullError

Backend = Literal["loky", "dask", "ray"]

TRIES = 3
"""How often in a row points are handed out without one of them being done."""

_NEEDS = {"dask": "distributed", "ray": "ray"}


def run_point(point: Point, folder: Path, records: bool) -> None:
    """Run one point and store what came of it; any error but a full disk becomes a result too."""
    store = Store(folder)
    try:
        file = store.records(point.key) if records else None
        failure = None
        if point.config.live is None:
            result = run(point.config, records=file)
        else:
            result, failure = run_live(point.config, records=file)
        if failure is None:
            outcome = {"key": point.key, "status": "done", "error": None, **result}
        else:
            outcome = {"key": point.key, "status": "failed", "error": failure}
    except DiskFullError:
        raise
    except Exception as error:
        text = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        outcome = {"key": point.key, "status": "failed", "error": text}
        if isinstance(error, InputError):
            outcome["refused"] = error.problem  # and would be again
        else:
            outcome["traceback"] = traceback.format_exc()
    store.put(point.key, outcome)


def is_done(store: Store, key: str, records: bool) -> bool:
    """Return whether *store* holds a good outcome of *key*; a failed one is tried again."""
    found = store.point(key)
    if found is None or found["status"] != "done":
        return False
    return not records or store.records(key).is_file()


def check_backend(backend: str) -> None:
    """Raise `InputError` when what *backend* needs is not installed."""
    needs = _NEEDS.get(backend)
    if needs is not None and importlib.util.find_spec(needs) is None:
        raise InputError(
            f"backend '{backend}' needs the package '{needs}', which is not installed",
            where="--backend",
            way_out=f"`pip install {needs}`, or use --backend loky",
        )


def perform(
    todo: list[Point], folder: Path, records: bool, jobs: int, backend: Backend
) -> Iterator[None]:
    """Run the points *todo* as `run_point` does, yielding after each.

    A point whose worker dies is run again; after `TRIES` times without any progress the error of
    the backend is raised, and what is done stays in *folder*.

    Raises:
        InputError: If nothing can be stored.
    """
    if (jobs == 1 and backend == "loky") or len(todo) < 2:
        for point in todo:
            run_point(point, folder, records)
            yield
        return
    store, tries = Store(folder), TRIES
    while todo:
        heard = 0
        try:
            for _ in _hand_out(todo, folder, records, jobs, backend):
                heard += 1
                yield
            return
        except InputError:  # the folder is gone, or full: another try would find it so
            raise
        except Exception:  # of a worker: `run_point` turns a run's own into a result
            left = [point for point in todo if not is_done(store, point.key, records)]
            tries = tries - 1 if len(left) == len(todo) else TRIES
            if not tries:
                raise
            for _ in range(len(todo) - len(left) - heard):
                yield
            todo = left


def _hand_out(
    todo: list[Point], folder: Path, records: bool, jobs: int, backend: Backend
) -> Iterator[None]:
    """Let the workers of *backend* run *todo*, yielding after each or after some."""
    import joblib

    task = joblib.delayed(run_point)
    with ExitStack() as stack:
        if backend == "dask":
            stack.enter_context(importlib.import_module("distributed").Client())
        if backend == "ray":
            importlib.import_module("ray.util.joblib").register_ray()
        more = {"initializer": _end_with, "initargs": (os.getpid(),)} if backend == "loky" else {}
        stack.enter_context(joblib.parallel_config(backend=backend, n_jobs=jobs, **more))
        if backend != "ray":
            ordered: Any = joblib.Parallel(return_as="generator_unordered")
            yield from ordered(task(point, folder, records) for point in todo)
            return
        parallel: Any = stack.enter_context(joblib.Parallel())  # its results come all at once
        size = 16 * jobs if jobs > 0 else 1024
        for at in range(0, len(todo), size):
            yield from parallel(task(point, folder, records) for point in todo[at : at + size])


def _end_with(parent: int) -> None:
    """Let this process, a worker, end soon after *parent* has; else it would wait for minutes."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    Thread(target=watch, name="moetier parent", daemon=True).start()
