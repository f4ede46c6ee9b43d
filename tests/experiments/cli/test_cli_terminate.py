"""Tests that a command which is told to end leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra 'models'")

CONFIG = Path(__file__).parents[3] / "experiments" / "configs" / "validate-disk-small.yaml"
MAIN = "from moetier.experiments.cli import main; main()"


@pytest.mark.slow
def test_a_validation_that_is_terminated_removes_its_work_folder(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    arguments = ["validate", str(CONFIG), "--out", str(tmp_path / "out")]
    with subprocess.Popen(
        [sys.executable, "-c", MAIN, *arguments],
        env={**os.environ, "TMPDIR": str(work)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as command:
        while not list(work.glob("moetier-validate-*/*")):
            assert command.poll() is None
            time.sleep(0.05)
        command.send_signal(signal.SIGTERM)
        status = command.wait(60)

    assert status == 128 + signal.SIGTERM
    assert list(work.iterdir()) == []
