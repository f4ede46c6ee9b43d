"""Tests that the comparison with real runs bites, on a real disk and a processor that is made slow.

Every expert takes milliseconds here, and several times as many while a copy is under way: by
waiting, so it is steady on a busy machine too. Calibration sees that processor as runs do. Then
copies, contention and decisions all matter, and a simulation that has one of them wrong must fail.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import pytest

pytest.importorskip("torch", reason="validation needs the extra 'models'")

from typer.testing import CliRunner

from moetier.experiments import validation
from moetier.experiments.cli import app
from moetier.experiments.files import find_file
from moetier.sim.policy.eviction.lru import LRU
from moetier.validate.compare.wrong import no_contention, twice_the_bandwidth
from moetier.validate.machines import run as real
from moetier.validate.machines.experts import Experts
from moetier.validate.machines.lanes import LaneSet

EXPERT, SLOWDOWN, NAP = 4e-3, 4, 3e-4  # seconds for one; beside copies it takes five times as long

CONFIG = {
    "policies": "[{name: LRU, eviction: lru}, {name: foreseen, prefetch: oracle}]",
    "capacity.dram": "[20 %]",
    "base.synthetic.tokens": "4",
    "pace": "100 MB/s",  # which a disk keeps while the processor is busy with something else
    "calibrate_seconds": "4",
    "tolerances": "{median_error: 0.1, p90_error: 0.15, kendall_tau: 0.7, beyond_spread: true, "
    "must_notice: [bandwidth doubled, contention off]}",
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def slow_processor() -> Iterator[None]:
    """Let experts take a time that copies make longer."""
    live: set[LaneSet] = set()
    begin, end, usual = LaneSet.__init__, LaneSet.close, Experts.run

    def opened(self: LaneSet, *args: Any, **given: Any) -> None:
        begin(self, *args, **given)
        live.add(self)

    def closed(self: LaneSet) -> None:
        live.discard(self)
        end(self)

    def run(self: Experts, *args: Any) -> Any:
        left, at = EXPERT, perf_counter()
        made = usual(self, *args)
        while left > 0:
            rate = 1 + SLOWDOWN * any(lanes._busy for lanes in live)
            sleep(NAP)
            passed = perf_counter() - at
            left, at = left - passed / rate, at + passed
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LaneSet, "__init__", opened)
        patch.setattr(LaneSet, "close", closed)
        patch.setattr(Experts, "run", run)
        yield


def asked(out: Path, **given: str) -> list[str]:
    """Return the command for the small grid with `CONFIG` and *given*."""
    sets = [f"--set={key}={value}" for key, value in (CONFIG | given).items()]
    small = find_file("experiments/configs/validate-disk-small.yaml")
    return ["validate", str(small), "--json", f"--out={out}", *sets]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("gate")
    return folder, CliRunner().invoke(app, asked(folder, repeats="2"))


@pytest.fixture
def again(calibrated: tuple[Path, Any], tmp_path: Path) -> Callable[[], Any]:
    """Run the command once more on the profile that was measured."""
    folder, _ = calibrated
    given = {"base.hardware": str(folder / "profile.yaml"), "repeats": "1"}
    return lambda: CliRunner().invoke(app, asked(tmp_path, **given))


def test_a_simulation_that_is_right_passes(calibrated: tuple[Path, Any]) -> None:
    folder, done = calibrated
    told = json.loads(done.stdout)

    assert (done.exit_code, told["missed"]) == (0, []), done.stderr
    assert told["passed"]
    assert told["would_notice"] == {"bandwidth doubled": True, "contention off": True}
    assert all(point["decision_log_equal"] for point in told["points"])
    assert all(min(point["stall_measured_ms"]) > 0 for point in told["points"])
    assert json.loads((folder / "validation.json").read_text()) == told


@pytest.mark.parametrize("wrong", [twice_the_bandwidth, no_contention])
def test_a_machine_that_is_wrong_is_noticed(
    wrong: Any, again: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        validation, "validate", partial(validation.validate, simulated_profile=wrong)
    )
    done = again()
    told = json.loads(done.stdout)

    assert done.exit_code == 1
    assert not told["passed"]
    assert "missed: median_error" in done.stderr
    by_policy = {point["policy"]: point["error"] for point in told["points"]}
    assert by_policy["foreseen"] < -0.15


def test_another_order_of_eviction_is_noticed(
    again: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def youngest(self: LRU, needed_bytes: int, pinned: Any) -> list[int]:
        found = []
        for s in reversed([s for s in self._order if s not in pinned]):
            if needed_bytes <= 0:
                break
            found.append(s)
            needed_bytes -= self.context.layout.nbytes[s]
        for s in found:
            del self._order[s]
        return found

    usual = real.run_on_disk

    def reversed_order(*args: Any, **given: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(LRU, "victims", youngest)
            return usual(*args, **given)

    monkeypatch.setattr(real, "run_on_disk", reversed_order)
    done = again()
    told = json.loads(done.stdout)
    lru = next(point for point in told["points"] if point["policy"] == "LRU")

    assert done.exit_code == 1
    assert "missed: decisions or bytes differ though the policy asks no lateness" in done.stderr
    assert "evicted" in lru["first_difference"]


def test_without_a_mutation_the_same_run_passes_again(again: Callable[[], Any]) -> None:
    done = again()

    assert done.exit_code == 0, done.stderr
