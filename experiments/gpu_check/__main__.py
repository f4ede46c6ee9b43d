"""This module runs the steps of a check one after the other, whatever becomes of each.

Each step is a process with a time of its own: one that fails, hangs or takes the device down with
it is reported, and the next one begins.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moetier.experiments.gpu_check.report import DRY, write_report
from moetier.experiments.gpu_check.steps import STEPS, Check, open_device, run_step
from moetier.traces.errors import InputError

OUT = Path("out/gpu-check")
GRACE = 3  # seconds to end after being asked to


def main(arguments: list[str] | None = None) -> int:
    """Run the check, or one step of it; return 0 where nothing failed."""
    given = _parser().parse_args(arguments)
    check = Check(given.out, given.dry_run)
    if given.step is not None:
        return _one(given.step, check)
    check.out.mkdir(parents=True, exist_ok=True)
    for old in check.out.glob("*.result.json"):
        old.unlink()
    try:
        with open_device(check) as device:
            name = device.name
    except (InputError, RuntimeError) as error:
        _say(f"no check: {error}")
        return 2
    report: dict[str, Any] = {
        "dry_run": check.dry,
        "note": DRY if check.dry else None,
        "device": name,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "steps": [],
    }
    for step, (_, budget) in STEPS.items():
        _say(f"{step} (at most {budget} s)")
        report["steps"].append(_step(step, check, budget))
        write_report(check.out, report)  # so that what is known is there, whatever comes
        _say(f"  {report['steps'][-1]['status']} {report['steps'][-1]['error'] or ''}")
    _say(str(check.out / "report.md"))
    return int(any(step["status"] != "passed" for step in report["steps"]))


def _step(name: str, check: Check, budget: float) -> dict[str, Any]:
    """Run the step *name* in a process for at most *budget* seconds; return what came of it."""
    command = [sys.executable, "-m", "moetier.experiments.gpu_check", str(check.out)]
    command += ["--step", name, *(["--dry-run"] if check.dry else [])]
    begin, log = time.monotonic(), check.out / f"{name}.log"
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(budget)
        except subprocess.TimeoutExpired:
            _end(process)
            status = None
        except BaseException:
            _end(process)
            raise
    result = check.out / f"{name}.result.json"
    found: dict[str, Any] = {
        "name": name,
        "status": "passed",
        "seconds": time.monotonic() - begin,
        "budget_s": budget,
        "error": None,
        "result": json.loads(result.read_text(encoding="utf-8")) if result.exists() else None,
    }
    if status is None:
        return found | {"status": "out of time", "error": f"ended after {budget} s; see {log.name}"}
    if status:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return found | {"status": "failed", "error": lines[-1] if lines else f"exit {status}"}
    if found["result"] and found["result"].get("missed"):
        return found | {"status": "missed", "error": "; ".join(found["result"]["missed"])}
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End *process* and all that it started."""
    for how in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            continue
        return


def _one(name: str, check: Check) -> int:
    try:
        run_step(name, check)
    except InputError as error:
        _say(str(error))
        return 1
    return 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check", description="Run everything that needs a GPU, in 8 minutes."
    )
    parser.add_argument("out", type=Path, nargs="?", default=OUT, help=f"folder; default {OUT}")
    parser.add_argument(
        "--dry-run", action="store_true", help="rehearse on a fake device, with a tiny model"
    )
    parser.add_argument("--step", choices=list(STEPS), help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
