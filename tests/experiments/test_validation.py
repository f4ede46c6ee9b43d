"""Tests of the comparison with real runs: a small one passes, and what it is there for fails it."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="validation needs the extra 'models'")

from typer.testing import CliRunner

from moetier.experiments import validation
from moetier.experiments.cli import app
from moetier.experiments.config import load_hardware
from moetier.experiments.files import find_file
from moetier.experiments.timeline import TimelineWriter
from moetier.experiments.validation import validate
from moetier.experiments.validation_config import load_validation
from moetier.experiments.verdict import Validation
from moetier.sim.run import simulate
from moetier.traces.errors import InputError
from moetier.validate.calibrate import run as calibration
from moetier.validate.machines import run as real

SMALL = "experiments/configs/validate-disk-small.yaml"
QUICK = [
    "calibrate_seconds=3",
    "repeats=2",
    "base.synthetic.tokens=4",
    "capacity.dram=[8 %]",
    "pace=100 MB/s",  # so slow that nothing else on the machine matters
]


def no_bar(_: str) -> Any:
    return nullcontext(lambda done, total: None)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Validation, Path]:
    folder = tmp_path_factory.mktemp("validation")
    config = load_validation(find_file(SMALL), QUICK)
    return validate(config, folder, bar=no_bar, timeline=folder / "timeline.json"), folder


@pytest.fixture
def on_profile(calibrated: tuple[Validation, Path]) -> list[str]:
    """Return what runs one point once, on the profile that was measured."""
    _, folder = calibrated
    return [
        *QUICK,
        f"base.hardware={folder / 'profile.yaml'}",
        "repeats=1",
        "policies=[on-demand]",
        "tolerances={kendall_tau: null}",
    ]


def test_a_small_grid_passes(calibrated: tuple[Validation, Path]) -> None:
    found, _ = calibrated

    assert found.missed == []
    assert all(point.decision_log_equal and point.bytes_equal for point in found.points)
    assert found.summary.stalled == len(found.points)
    told = json.loads(json.dumps(found.as_dict()))
    assert {"points", "median_error", "p90_error", "kendall_tau", "known_limitations"} <= set(told)
    assert {"policy", "capacity", "tpot_sim_ms", "tpot_measured_ms"} <= set(told["points"][0])
    assert any("measured on this machine" in text for text in found.known_limitations)


def test_one_timeline_holds_both_machines(calibrated: tuple[Validation, Path]) -> None:
    _, folder = calibrated
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]

    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert [name.rpartition("(")[2] for name in names] == ["simulated)", "measured)"]
    assert {e["pid"] for e in events if e["ph"] == "X"} == {1, 2}


def test_a_profile_of_another_machine_is_refused(
    calibrated: tuple[Validation, Path], tmp_path: Path
) -> None:
    _, folder = calibrated
    text = (folder / "profile.yaml").read_text()
    other = tmp_path / "other.yaml"
    other.write_text(
        text.replace("identity:\n", "identity:\n  cpu: 6502\n", 1)
        if "cpu:" not in text
        else "\n".join(
            "  cpu: '6502'" if line.startswith("  cpu:") else line for line in text.split("\n")
        )
    )
    config = load_validation(find_file(SMALL), [*QUICK, f"base.hardware={other}"])

    with pytest.raises(InputError, match="6502"):
        validate(config, tmp_path, bar=no_bar)


@pytest.fixture
def no_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where anything is measured."""

    def measure(*_: Any, **__: Any) -> None:
        raise AssertionError("minutes would have been spent")

    monkeypatch.setattr(calibration, "calibrate", measure)


WRONG = [
    ("pace=fast", "pace"),
    ("policies=[nonsense]", "unknown policy 'nonsense'"),
    ("capacity={dram: [8 %], hbm: [8 %]}", "capacity"),
    ("repeats=0", "repeats"),
    ("base.trace=x.parquet", "one routing source"),
    ("folder=/nonexistent", "validate-disk-small: folder: /nonexistent: cannot be used: No such"),
    ("base.synthetic.tokens=1", "capacity.dram=8 %: no time per output token: it leaves out the"),
    ("base.measure.warmup_steps=9", "the first decode step, and 9 of warm-up"),
    ("capacity.dram=[8 %, 1 MiB]", "policy=LRU, capacity.dram=1 MiB: .* give at least 6 MiB"),
    ("capacity.dram=[100 TiB]", "capacity.dram=100 TiB"),
    ("policies=[{miss: cpu}]", "nothing computes from tier 'disk'"),
    ("policies=[{precision: {kind: uniform, bits: 9}}]", "codes of 9 bits have no kernel"),
]


@pytest.mark.usefixtures("no_calibration")
@pytest.mark.parametrize(("override", "problem"), WRONG)
def test_what_is_wrong_is_named_before_anything_is_measured(
    override: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=problem):
        validate(load_validation(find_file(SMALL), [*QUICK, override]), tmp_path, bar=no_bar)


@pytest.mark.usefixtures("no_calibration")
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["--set=folder=/nonexistent"], "error: validate-disk-small: folder: /nonexistent"),
        (["--set=base.synthetic.tokens=1"], "no time per output token"),
        (["--timeline=/nonexistent/t.json"], "directory '/nonexistent' does not exist"),
    ],
)
def test_the_command_says_what_is_wrong(given: list[str], problem: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["validate", SMALL, "--out", str(tmp_path / "new"), *given])

    assert done.exit_code == 2
    assert problem in done.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("no_calibration")
def test_a_file_is_no_folder_for_results(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    done = CliRunner().invoke(app, ["validate", SMALL, "--out", str(taken)])

    assert done.exit_code == 2
    assert f"error: {taken}: cannot be made" in done.stderr
    assert taken.read_text() == "mine"


def test_popularity_reaches_both_machines(
    on_profile: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def noted(run: Any) -> Any:
        def call(*args: Any, **given: Any) -> Any:
            seen.append(given["popularity"])
            return run(*args, **given)

        return call

    monkeypatch.setattr(validation, "simulate", noted(simulate))
    monkeypatch.setattr(real, "run_on_disk", noted(real.run_on_disk))
    static = ["policies=[{eviction: static, warmup: static}]", "base.popularity=own"]
    config = load_validation(find_file(SMALL), [*on_profile, *static])
    found = validate(config, tmp_path, bar=no_bar)

    assert len(seen) >= 3  # checked, simulated, measured
    assert all(source is not None for source in seen)
    assert found.points[0].decision_log_equal


def test_warm_up_is_left_out_of_times_and_causes(on_profile: list[str], tmp_path: Path) -> None:
    given = ["base.measure.warmup_steps=2", "base.synthetic.tokens=6"]
    config = load_validation(find_file(SMALL), [*on_profile, *given])
    (point,) = validate(config, tmp_path, bar=no_bar).points

    told = point.attribution_ms
    assert told is not None
    difference = point.tpot_measured_ms[0] - point.tpot_sim_ms
    assert sum(told.values()) == pytest.approx(difference, abs=1e-6)


def test_nothing_is_written_while_a_run_goes_on(
    on_profile: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    run_on_disk, write = real.run_on_disk, TimelineWriter.__call__

    def run(*args: Any, **given: Any) -> Any:
        events.append("begin")
        found = run_on_disk(*args, **given)
        events.append("end")
        return found

    def noted(self: TimelineWriter, span: Any) -> None:
        events.append("write")
        write(self, span)

    monkeypatch.setattr(real, "run_on_disk", run)
    monkeypatch.setattr(TimelineWriter, "__call__", noted)
    config = load_validation(find_file(SMALL), on_profile)
    validate(config, tmp_path, bar=no_bar, timeline=tmp_path / "t.json")

    assert [kind for kind in events if kind != "write"] == ["begin", "end"] * 2
    assert events[:4] == ["begin", "end"] * 2
    assert events[-1] == "write"


def test_a_link_twice_as_fast_is_noticed_where_repeats_allow_it(
    calibrated: tuple[Validation, Path], on_profile: list[str], tmp_path: Path
) -> None:
    """The same measurements say nothing once their spread is as wide as the time itself."""
    found, folder = calibrated
    assert found.would_notice["bandwidth doubled"]

    given = [*QUICK, f"base.hardware={folder / 'profile.yaml'}"]
    config = load_validation(find_file(SMALL), given)
    profile = load_hardware(str(folder / "profile.yaml"))
    cases = validation._cases(config, str(folder / "profile.yaml"))
    wide = [
        replace(point, tpot_measured_ms=[t * by for t in point.tpot_measured_ms for by in (0.3, 2)])
        for point in found.points
    ]

    def asked(points: Any) -> bool:
        told = validation._would_notice(config, cases, points, lambda _: profile)
        return told["bandwidth doubled"]

    assert asked(found.points)
    assert not asked(wide)


def test_the_command_leaves_its_results_in_a_folder(on_profile: list[str], tmp_path: Path) -> None:
    given = [f"--set={text}" for text in [*on_profile, "tolerances={kendall_tau: 0}"]]
    out = tmp_path / "new"
    done = CliRunner().invoke(app, ["validate", SMALL, "--out", str(out), *given])

    assert done.exit_code == 1
    assert "missed: kendall_tau cannot be tested against 0.0: no capacity has two" in done.stderr
    assert {"validation.json", "points.csv"} <= {path.name for path in out.iterdir()}
    assert len((out / "points.csv").read_text().splitlines()) == 2
    told = json.loads((out / "validation.json").read_text())
    assert told["passed"] is False
    assert told["missed"] == [done.stderr.strip().removeprefix("missed: ")]
    assert "beyond spread" in done.stdout
    assert "a simulation with bandwidth doubled fails" in done.stdout
