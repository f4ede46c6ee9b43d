"""What goes wrong on the CUDA machine is named, and leaves no thread and no memory behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moetier.sim.plan import LayerPlan
from moetier.sim.run import Setting
from moetier.traces.errors import InputError
from moetier.traces.synthetic import Synthetic
from moetier.validate.machines.cuda.device import require
from moetier.validate.machines.cuda.fake import FakeDevice
from moetier.validate.machines.cuda.run import CudaRuns, run_on_cuda

Devices = Callable[..., FakeDevice]
Settings = Callable[..., Setting]
PINNED = 24 * 12_288  # all experts


def test_too_little_pinned_memory_names_the_bytes(
    device: Devices, source: Synthetic, setting: Settings
) -> None:
    with pytest.raises(
        InputError,
        match=rf"expert weights: 288 KiB \({PINNED} bytes\) are needed on the host, "
        "and 287 KiB are free; lower the capacity, or use fewer layers",
    ):
        run_on_cuda(source, setting(), device(pinned_bytes=PINNED - 1024))
    run_on_cuda(source, setting(), device(pinned_bytes=PINNED))


def test_too_little_memory_on_the_device_names_the_bytes(
    device: Devices, source: Synthetic, setting: Settings
) -> None:
    with pytest.raises(InputError, match=r"slots: .* \(\d+ bytes\) are needed on the device, and"):
        run_on_cuda(source, setting(), device(device_bytes=PINNED // 2))


def test_memory_that_runs_out_while_slots_are_made_is_given_back(
    device: Devices, source: Synthetic, setting: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program may take what was free when it was asked."""
    monkeypatch.setattr(FakeDevice, "free", lambda _: 1 << 40)
    mine = device(device_bytes=PINNED // 2)

    with pytest.raises(InputError, match=r"12 KiB .* are needed on the device, and"):
        run_on_cuda(source, setting(), mine)

    assert mine.lent == 0


def test_pinned_memory_that_runs_out_half_way_is_given_back(
    device: Devices, source: Synthetic, setting: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeDevice, "free_pinned", lambda _: None)
    mine = device(pinned_bytes=PINNED // 2)

    with pytest.raises(InputError, match=r"96 KiB .* are needed on the host, and 48 KiB are free"):
        run_on_cuda(source, setting(), mine)

    assert mine.lent == 0


def test_dense_weights_that_do_not_fit_are_named(
    device: Devices, source: Synthetic, setting: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([10])  # bytes, when the dense part asks first
    monkeypatch.setattr(FakeDevice, "free", lambda _: next(free))

    with pytest.raises(InputError, match=r"dense weights: .* and 10 B are free"):
        run_on_cuda(source, setting(), device())


@pytest.mark.parametrize("at", [0, 7])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_copy_that_fails_is_heard_of(
    at: int, overlap: bool, device: Devices, source: Synthetic, setting: Settings
) -> None:
    mine = device(fails=lambda n: RuntimeError("an illegal address") if n == at else None)

    with pytest.raises(RuntimeError, match="an illegal address"):
        run_on_cuda(source, setting("on-demand", 25, overlap=overlap), mine)

    assert mine.copies > at
    assert mine.lent == 0


def test_a_copy_of_a_warm_slice_that_fails_is_heard_of(
    device: Devices, source: Synthetic, setting: Settings
) -> None:
    mine = device(fails=lambda n: RuntimeError("an illegal address"))

    with pytest.raises(RuntimeError, match="an illegal address"):
        run_on_cuda(source, setting({"eviction": "lru", "warmup": "random"}, 100), mine)


def test_after_a_failure_the_next_run_is_none_the_worse(
    device: Devices, source: Synthetic, setting: Settings
) -> None:
    mine = device(fails=lambda n: RuntimeError("an illegal address") if n == 3 else None)
    with CudaRuns(mine) as runs:
        with pytest.raises(RuntimeError):
            runs.run(source, setting("on-demand", 25))
        found = runs.run(source, setting("on-demand", 25))

    assert found.metrics["tokens"] == 12


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_what_is_raised_in_the_middle_ends_all(
    error: type[BaseException], device: Devices, source: Synthetic, setting: Settings
) -> None:
    """The fixture sees that no thread of lanes or streams is left."""

    def at_step_5(plan: LayerPlan) -> None:
        if plan.batch.step == 5:
            raise error

    mine = device()
    with pytest.raises(error):
        run_on_cuda(source, setting("on-demand", 25, 2), mine, on_plan=at_step_5)

    assert mine.lent == 0


PROGRAM = """
    import threading
    from moetier.sim.run import Setting
    from moetier.sim.testing import toy_profile
    from moetier.traces.geometry import load_geometry
    from moetier.traces.synthetic import Synthetic
    from moetier.validate.machines.cuda.fake import FakeDevice
    from moetier.validate.machines.cuda.run import run_on_cuda
    from moetier.validate.machines.pacing import Pace

    device = FakeDevice(pace=Pace(1000))  # hours for one copy
    begun = lambda plan: print("begun", flush=True)
    try:
        run_on_cuda(Synthetic(load_geometry("moe-small"), tokens=50), Setting(toy_profile()),
                    device, lanes=2, on_plan=begun)
    finally:
        threads = [t.name for t in threading.enumerate() if t.name.startswith("moetier")]
        print("left", threads, device.lent, flush=True)
"""


@pytest.mark.slow
def test_ctrl_c_leaves_no_thread_behind(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    begun = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)

    assert begun == "begun\n", err
    assert out.splitlines()[-1] == "left [] 0"
    assert "KeyboardInterrupt" in err
    assert process.returncode != 0


def test_what_is_unknown_to_be_free_is_not_refused() -> None:
    require(1 << 60, None, "all")


def test_a_device_counts_what_it_lends() -> None:
    device = FakeDevice(device_bytes=100, pinned_bytes=50)
    memory, pinned = device.memory(60), device.pinned(50)

    assert (device.free(), device.free_pinned(), device.lent) == (40, 0, 110)
    with pytest.raises(InputError, match="41 B"):
        device.memory(41)

    device.release(memory)
    device.release(pinned)

    assert (device.free(), device.free_pinned(), device.lent) == (100, 50, 0)
    assert memory.dtype == torch.uint8
