"""`machine: {kind: cuda}` of a live run, with a fake device in place of the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="live runs need the extra 'models'")

from moetier.experiments.config import check_run  # noqa: E402
from moetier.experiments.live_runs import run_live  # noqa: E402
from moetier.traces.errors import InputError  # noqa: E402
from moetier.validate.machines.cuda import torch_cuda  # noqa: E402
from moetier.validate.machines.cuda.fake import NAME, FakeDevice  # noqa: E402

RUN: dict[str, Any] = {
    "live": "moe-tiny",
    "hardware": "rtx-4090",
    "capacity": {"hbm": "25 %"},
    "policy": "previous-token",
    "evaluate": {"items": 2, "long_prompts": 0, "long_tokens": 0},
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeDevice]:
    """Stand in for the GPU."""
    fake = FakeDevice()
    monkeypatch.setattr(torch_cuda, "open_cuda", lambda: fake)
    monkeypatch.setenv("MOETIER_CACHE", str(tmp_path))
    yield fake

    assert fake.lent == 0


def test_it_decides_as_a_simulated_run_and_says_where_it_ran(device: FakeDevice) -> None:
    simulated, _ = run_live(check_run(RUN, "test"))
    real, failure = run_live(check_run(RUN | {"machine": {"kind": "cuda", "lanes": 2}}, "test"))

    assert failure is None
    assert device.copies > 0
    for key in ("accuracy", "miss_rate", "byte_miss_rate", "lossless"):
        assert real[key] == simulated[key]
    said = " ".join(real["known_limitations"])
    assert f"time is measured on {NAME}" in said
    assert "one stream and one thread" in said


@pytest.mark.parametrize("key", [{"pace": "1 GB/s"}, {"folder": "/tmp"}, {"latency": "1 us"}])
def test_what_is_of_a_disk_is_refused(key: dict[str, str], device: FakeDevice) -> None:
    with pytest.raises(InputError, match=f"`{next(iter(key))}` is of a disk, and the machine is a"):
        run_live(check_run(RUN | {"machine": {"kind": "cuda", **key}}, "test"))
    assert device.copies == 0


def test_without_a_gpu_there_is_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(InputError, match="sees no CUDA device; use the disk machine, or"):
        run_live(check_run(RUN | {"machine": {"kind": "cuda"}}, "test"))
