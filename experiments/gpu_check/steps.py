"""This module holds the steps of a check, each of which runs in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetier.experiments.files import find_file
from moetier.experiments.gpu_check.energy import compare_energy
from moetier.experiments.store import dump_json, write_text
from moetier.traces.errors import InputError
from moetier.traces.geometry import load_geometry

if TYPE_CHECKING:
    from moetier.validate.machines.cuda.device import Device

CONFIG = "experiments/configs/validate-cuda.yaml"
TESTS = "tests/validate/machines/cuda"
TINY = [  # of a dry run: the same policies on a model that anything can run
    "base.synthetic.geometry=moe-small",
    "base.synthetic.layers=2",
    "base.synthetic.tokens=6",
    "repeats=1",
    "tolerances={median_error: 1000, p90_error: 1000, kendall_tau: null}",  # of times; not of bytes
]


@dataclass(frozen=True)
class Check:
    """Where results go, and whether all of it is a rehearsal on a fake device."""

    out: Path
    dry: bool

    @property
    def profile(self) -> Path:
        """Return the profile that calibration writes."""
        return self.out / ("dry-run-profile.yaml" if self.dry else "gpu-profile.yaml")

    @property
    def geometry(self) -> str:
        """Return the model whose geometry is used."""
        return "moe-small" if self.dry else "qwen3-30b-a3b"


def open_device(check: Check) -> AbstractContextManager[Device]:
    """Return the device of *check*, closed at the end: the GPU, or the fake one of a dry run."""
    from moetier.validate.machines.cuda.fake import FakeDevice
    from moetier.validate.machines.cuda.torch_cuda import open_cuda
    from moetier.validate.machines.pacing import Pace

    device: Device
    if check.dry:
        room = 4 << 30
        device = FakeDevice(
            device_bytes=room,
            pinned_bytes=room,
            pace=Pace(1_000_000_000),
            counts_energy=True,
            energy_window=10_000_000,
        )
    else:
        device = open_cuda()
    return closing(device)


def tests(check: Check) -> dict[str, Any]:
    """Run the tests marked `gpu`; return their last line."""
    environment = dict(os.environ)
    if check.dry:
        environment["MOETIER_GPU_CHECK"] = "dry"
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-m", "gpu", "-rs", "-W", "default",
            "-p", "no:cacheprovider", TESTS,
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    sys.stdout.write(done.stdout + done.stderr)
    lines = done.stdout.strip().splitlines()
    summary = lines[-1].strip("= ") if lines else "no output"
    if done.returncode or "passed" not in summary:
        raise InputError(summary, where="tests", way_out="its log has the whole output")
    return {"summary": summary}


def calibrate(check: Check) -> dict[str, Any]:
    """Measure the device; return the main figures."""
    from moetier.validate.calibrate.run import calibrate as measure

    with open_device(check) as device:
        profile = measure(
            "cuda",
            check.profile,
            load_geometry(check.geometry),
            seconds=2 if check.dry else 40,
            lanes=2,
            device=device,
        )
    link = profile.links[0]
    return {
        "profile": check.profile.name,
        "link_peak_bytes_per_s": int(link.bandwidth.peak),
        "host_ns_per_layer": profile.main_compute.host_time_per_layer,
        "static_power_uw": profile.static_power or None,
    }


def validate(check: Check) -> dict[str, Any]:
    """Hold simulations against runs; return the errors."""
    from moetier.experiments.validation import validate as compare
    from moetier.experiments.validation_config import load_validation

    given = list(TINY) if check.dry else []
    if check.profile.exists():
        given.append(f"base.hardware={check.profile}")
    else:  # calibration failed, and this tries again
        given.append(f"calibrate_seconds={2 if check.dry else 30}")
    with open_device(check) as device:
        config = load_validation(find_file(CONFIG), given)
        lanes = check.out / "timeline.json"  # of the first point, simulated and measured
        found = compare(config, check.out, bar=no_bar, device=device, timeline=lanes)
        data = found.as_dict() | {"dry_run": check.dry, "device": device.name}
    write_text(check.out / "validation.json", dump_json(data) + "\n")
    return {
        "points": len(found.points),
        "equal": found.summary.equal,
        "median_error": found.summary.median_error,
        "p90_error": found.summary.p90_error,
        "kendall_tau": found.summary.kendall_tau,
        "missed": found.missed,
    }


def energy(check: Check) -> dict[str, Any]:
    """Hold simulated energy against the device's counter; return a row per policy."""
    if not check.profile.exists():
        raise InputError(
            f"there is no {check.profile.name}", where="energy", way_out="calibration has to work"
        )
    with open_device(check) as device:
        rows = compare_energy(
            device,
            check.profile,
            check.geometry,
            layers=2 if check.dry else 12,
            tokens=8 if check.dry else 400,
        )
        data = {"dry_run": check.dry, "device": device.name, "rows": rows}
    write_text(check.out / "energy.json", dump_json(data) + "\n")
    return {"rows": rows}


STEPS: dict[str, tuple[Callable[[Check], dict[str, Any]], int]] = {
    "tests": (tests, 75),
    "calibrate": (calibrate, 75),
    "validate": (validate, 240),
    "energy": (energy, 60),
}
"""By name: what it does, and how many seconds it may take."""


def no_bar(_: str) -> Any:
    """Show no progress."""
    return nullcontext(lambda done, total: None)


def run_step(name: str, check: Check) -> None:
    """Run the step *name* and write what it returns to a file of its own."""
    work, _ = STEPS[name]
    check.out.joinpath(f"{name}.result.json").write_text(json.dumps(work(check)), encoding="utf-8")
