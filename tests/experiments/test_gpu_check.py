"""`scripts/gpu_check` as a rehearsal, and what becomes of steps that go wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="a check needs the extra 'models'")

from moetier.experiments.gpu_check import __main__ as check  # noqa: E402
from moetier.experiments.gpu_check.report import DRY, as_page  # noqa: E402
from moetier.experiments.gpu_check.steps import (  # noqa: E402
    STEPS,
    Check,
    calibrate,
    energy,
    run_step,
    validate,
)
from moetier.sim.hardware import load_profile  # noqa: E402
from moetier.traces.errors import InputError  # noqa: E402
from moetier.validate.machines.cuda.fake import NAME  # noqa: E402

ROOT = Path(__file__).parents[2]


def test_all_of_it_takes_less_than_eight_minutes() -> None:
    assert sum(seconds + check.GRACE for _, seconds in STEPS.values()) < 8 * 60


@pytest.mark.slow
def test_a_dry_run_does_everything_and_says_what_it_is(tmp_path: Path) -> None:
    out = tmp_path / "check"
    command = [sys.executable, "-m", "moetier.experiments.gpu_check", str(out), "--dry-run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    report = json.loads((out / "report.json").read_text())

    assert done.returncode == 0, done.stdout + (out / "report.md").read_text()
    assert [step["status"] for step in report["steps"]] == ["passed"] * len(STEPS)
    assert {step["name"] for step in report["steps"]} == {
        "tests",
        "calibrate",
        "validate",
        "energy",
    }
    for name in ("report", "validation", "energy"):
        data = json.loads((out / f"{name}.json").read_text())
        assert data["dry_run"] is True
        assert data["device"] == NAME
    assert (out / "report.md").read_text().splitlines()[2] == f"**{DRY}**"
    assert NAME in (out / "dry-run-profile.yaml").read_text()
    assert not (out / "gpu-profile.yaml").exists()
    validation = json.loads((out / "validation.json").read_text())
    assert len(validation["points"]) >= 12
    assert validation["equal"]
    rows = json.loads((out / "energy.json").read_text())["rows"]
    assert all(row["measured_mj"] > 0 and row["simulated_mj"] > 0 for row in rows)


@pytest.mark.slow
def test_steps_hand_on_what_they_found(tmp_path: Path) -> None:
    """In one process, so that what each returns can be looked at."""
    rehearsal = Check(tmp_path, dry=True)
    measured = calibrate(rehearsal)
    compared = validate(rehearsal)
    counted = energy(rehearsal)
    profile = load_profile(rehearsal.profile)

    assert measured["link_peak_bytes_per_s"] == profile.links[0].bandwidth.peak
    assert measured["host_ns_per_layer"] == profile.main_compute.host_time_per_layer
    assert compared["points"] == 14
    assert compared["equal"] is True
    assert compared["missed"] == []
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert len(counted["rows"]) == 4
    for row in counted["rows"]:
        assert row["measured_on"] == NAME
        assert row["error"] == pytest.approx(row["simulated_mj"] / row["measured_mj"] - 1)
        # the counter of the fake device is the clock
        assert row["measured_mj"] == pytest.approx(row["measured_s"] * 50_000, rel=0.1)


@pytest.mark.slow
def test_a_comparison_without_a_profile_measures_the_device_itself(tmp_path: Path) -> None:
    found = validate(Check(tmp_path, dry=True))

    assert found["missed"] == []
    assert (tmp_path / "profile.yaml").exists()


def test_without_a_gpu_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert check.main([str(tmp_path)]) == 2
    assert "no check: machine: torch" in capsys.readouterr().out
    assert not (tmp_path / "report.json").exists()


def stand_in(monkeypatch: pytest.MonkeyPatch, program: str, budget: float = 30) -> None:
    """Let there be one step, whose process runs *program*."""
    monkeypatch.setattr(check, "STEPS", {"tests": (None, budget)})
    usual = subprocess.Popen

    def started(command: list[str], **given: Any) -> Any:
        return usual([sys.executable, "-c", program, command[3]], **given)

    monkeypatch.setattr(subprocess, "Popen", started)


@pytest.mark.parametrize(
    ("program", "budget", "status", "error"),
    [
        ("print('a'); raise SystemExit('it broke')", 30, "failed", "it broke"),
        ("raise SystemExit(3)", 30, "failed", "exit 3"),
        ("import time; time.sleep(60)", 0.5, "out of time", "ended after 0.5 s; see tests.log"),
        (
            "import sys; from pathlib import Path; p = Path(sys.argv[1]) / 'tests.result.json'; "
            "p.write_text('{\"missed\": [\"tau\"]}')",
            30, "missed", "tau",
        ),
        ("pass", 30, "passed", None),
    ],
)  # fmt: skip
def test_what_becomes_of_a_step_is_reported_and_the_check_goes_on(
    program: str,
    budget: float,
    status: str,
    error: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in(monkeypatch, program, budget)
    code = check.main([str(tmp_path), "--dry-run"])
    (step,) = json.loads((tmp_path / "report.json").read_text())["steps"]

    assert (step["status"], step["error"]) == (status, error)
    assert code == int(status != "passed")
    assert step["seconds"] < 30


def test_what_an_earlier_check_left_is_not_taken_for_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests.result.json").write_text('{"summary": "old"}')
    stand_in(monkeypatch, "pass")
    check.main([str(tmp_path), "--dry-run"])
    (step,) = json.loads((tmp_path / "report.json").read_text())["steps"]

    assert step["result"] is None


def test_energy_without_a_profile_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no dry-run-profile\.yaml"):
        energy(Check(tmp_path, dry=True))


def test_a_step_by_itself_names_its_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main([str(tmp_path), "--dry-run", "--step", "energy"]) == 1
    assert "calibration has to work" in capsys.readouterr().out


def test_a_step_writes_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STEPS, "tests", (lambda given: {"dry": given.dry}, 1))
    run_step("tests", Check(tmp_path, dry=True))

    assert json.loads((tmp_path / "tests.result.json").read_text()) == {"dry": True}


def test_the_page_of_a_real_check_claims_no_dry_run_and_shows_what_is_unknown() -> None:
    row = {
        "policy": "LRU", "capacity": "10 %", "simulated_mj": 12.4, "measured_mj": None,
        "error": None,
    }  # fmt: skip
    step = {
        "name": "energy", "status": "passed", "seconds": 3.2, "budget_s": 55, "error": None,
        "result": {"rows": [row]},
    }  # fmt: skip
    report = {"dry_run": False, "began": "now", "device": "a GPU", "steps": [step]}
    page = as_page(report)

    assert "DRY RUN" not in page
    assert "| LRU | 10 % | 12 | unknown | unknown |" in page
