"""Faults in the middle of a run are named, and nothing is left behind, by Ctrl-C neither."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moetier.sim.plan import LayerPlan
from moetier.sim.run import Setting
from moetier.traces.errors import InputError
from moetier.traces.synthetic import Synthetic
from moetier.validate.machines.pacing import Pace
from moetier.validate.machines.run import pack_synthetic, run_on_disk
from moetier.validate.machines.slices_file import SlicesFile


@pytest.fixture
def path(tmp_path: Path, source: Synthetic, setting: Callable[..., Setting]) -> Path:
    found = tmp_path / "mine.slices"
    pack_synthetic(found, source, setting())
    return found


def cut(path: Path) -> None:
    os.truncate(path, 4096)


def change(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"something else")
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (cut, "has 4096 bytes, and had"),
        (change, "was written to since it was opened"),
        (Path.unlink, "was removed or replaced"),
    ],
)
def test_harm_to_the_file_in_mid_run_is_named(
    harm: Callable[[Path], None],
    said: str,
    path: Path,
    source: Synthetic,
    setting: Callable[..., Setting],
) -> None:
    def at_step_5(plan: LayerPlan) -> None:
        if (plan.batch.step, plan.batch.layer) == (5, 0):
            harm(path)

    with pytest.raises(InputError, match=f"mine.slices: {said}"):
        run_on_disk(source, setting("on-demand", 25), path, on_plan=at_step_5)


def test_harm_to_the_file_before_the_run_is_named(
    path: Path, source: Synthetic, setting: Callable[..., Setting]
) -> None:
    cut(path)
    with pytest.raises(InputError, match=r"mine.slices: is not a file of expert slices"):
        run_on_disk(source, setting(), path)
    path.unlink()
    with pytest.raises(InputError, match=r"mine.slices: cannot be read: No such file"):
        run_on_disk(source, setting(), path)


def test_a_lane_that_dies_is_heard_of(
    path: Path,
    source: Synthetic,
    setting: Callable[..., Setting],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    really, count = SlicesFile.read, []

    def dies(file: SlicesFile, slice_id: int, slot: Any) -> None:
        count.append(slice_id)
        if len(count) == 20:
            raise ZeroDivisionError("a bug")
        really(file, slice_id, slot)

    monkeypatch.setattr(SlicesFile, "read", dies)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run_on_disk(source, setting("on-demand", 25), path, pace=Pace(1 << 40))


PACKING = """
    from pathlib import Path
    from moetier.sim.layout import Layout
    from moetier.traces.geometry import Geometry
    from moetier.validate.machines.slices_file import write_slices

    def forever(slice_id):
        print("begun", flush=True)
        import time
        while slice_id == 3:
            time.sleep(1)
        return b"x" * 5000

    geometry = Geometry(name="g", n_experts=8, top_k=1, moe_layers=[0])
    try:
        write_slices("x.slices", Layout([[5000]], 8), forever, geometry=geometry, weights="bf16",
                     source="a test")
    finally:
        print("left", [p.name for p in Path().iterdir()], flush=True)
"""

RUNNING = """
    import os, sys, threading
    from fractions import Fraction
    from moetier.sim.run import Setting
    from moetier.sim.testing import toy_profile
    from moetier.traces.synthetic import Synthetic
    from moetier.validate.machines.pacing import Pace
    from moetier.validate.machines.run import run_on_disk
    from moetier.validate.machines.slices_file import SlicesFile

    with SlicesFile("mine.slices") as file:
        source = Synthetic(file.index.geometry, tokens=50)
    open_before = len(os.listdir("/proc/self/fd"))
    begun = lambda plan: print("begun", flush=True)
    try:
        run_on_disk(source, Setting(toy_profile()), "mine.slices", lanes=2, pace=Pace(10),
                    on_plan=begun)
    finally:
        threads = [t.name for t in threading.enumerate() if t.name.startswith("moetier")]
        print("left", threads, len(os.listdir("/proc/self/fd")) - open_before, flush=True)
"""


@pytest.mark.parametrize(
    ("program", "left"), [(PACKING, "left ['mine.slices']"), (RUNNING, "left [] 0")]
)
def test_ctrl_c_leaves_nothing_behind(program: str, left: str, path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=path.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    begun = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)

    assert begun == "begun\n", err
    assert out.splitlines()[-1] == left
    assert "KeyboardInterrupt" in err
    assert process.returncode != 0
    assert [p.name for p in path.parent.iterdir()] == ["mine.slices"]
