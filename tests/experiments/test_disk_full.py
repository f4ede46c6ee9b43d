"""Tests that a disk that is full ends a sweep, and is not taken for what its points come to."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moetier.experiments import perform
from moetier.experiments.points import Point
from moetier.experiments.store import Store
from moetier.experiments.sweep import SweepConfig, points_of
from moetier.traces.errors import InputError
from moetier.traces.files import replacing

RUN = {
    "synthetic": {"geometry": "moe-tiny", "prompt": 4, "tokens": 2},
    "hardware": "phone-ufs4",
    "capacity": {"dram": "25 %"},
}


def test_a_full_disk_is_no_outcome_of_a_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out_of_room(config: Any, records: Path | None) -> None:
        with replacing(tmp_path / "records.parquet"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    config = SweepConfig.model_validate({"name": "s", "base": RUN, "sweep": {"seed": [0]}})
    (point,) = points_of(config, "test")
    store = Store(tmp_path)
    store.create()
    monkeypatch.setattr(perform, "run", run_out_of_room)

    with pytest.raises(InputError, match="No space left on device; make room"):
        perform.run_point(point, tmp_path, records=False)

    assert store.point(point.key) is None


def test_what_cannot_be_stored_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def full(todo: list[Point], *_: Any) -> Iterator[None]:
        tried.append(len(todo))
        raise InputError("cannot be written", where=tmp_path)

    monkeypatch.setattr(perform, "_hand_out", full)
    config = SweepConfig.model_validate({"name": "s", "base": RUN, "sweep": {"seed": [0, 1]}})

    with pytest.raises(InputError, match="cannot be written"):
        list(perform.perform(points_of(config, "test"), tmp_path, False, 2, "loky"))

    assert tried == [2]
