"""Tests of the comparison with real runs: a small one passes, and what it is there for fails it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="validation needs the extra 'models'")

from moetier.experiments.files import find_file
from moetier.experiments.validation import (
    ValidateConfig,
    Validation,
    load_validation,
    missed,
    validate,
)
from moetier.sim.hardware import Profile
from moetier.traces.errors import InputError
from moetier.validate.compare.grid import Summary
from moetier.validate.compare.ranking import Ranking

SMALL = "experiments/configs/validate-disk-small.yaml"
QUICK = [
    "calibrate_seconds=3",
    "repeats=2",
    "base.synthetic.tokens=6",
    "capacity.dram=[8 %]",
    "pace=50 MB/s",  # so slow that nothing else on the machine matters
]


def no_bar(_: str) -> Any:
    return nullcontext(lambda done, total: None)


Run = Callable[..., Validation]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Validation, Path]:
    folder = tmp_path_factory.mktemp("validation")
    config = load_validation(find_file(SMALL), QUICK)
    return validate(config, folder, bar=no_bar, timeline=folder / "timeline.json"), folder


@pytest.fixture
def again(calibrated: tuple[Validation, Path], tmp_path: Path) -> Run:
    """Run once more on the profile that was measured."""
    _, folder = calibrated
    given = [*QUICK, f"base.hardware={folder / 'profile.yaml'}", "repeats=1"]
    return partial(validate, load_validation(find_file(SMALL), given), tmp_path, bar=no_bar)


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


def double(profile: Profile) -> Profile:
    """Believe in a link of twice the bandwidth."""
    data = profile.model_dump(mode="json")
    for row in data["links"][0]["bandwidth"]:
        row["rate"] = f"{int(row['rate'].split()[0].replace(',', '')) * 2} {row['rate'].split()[1]}"
    return Profile.model_validate(data)


def test_twice_the_bandwidth_is_noticed(again: Run) -> None:
    assert any("median_error" in text for text in again(simulated_profile=double).missed)


def test_another_order_of_eviction_is_noticed(again: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from moetier.sim.policy.eviction.lru import LRU
    from moetier.validate.machines import run as real

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

    found = again()

    assert "decisions or bytes differ though the policy asks no lateness" in found.missed
    lru = next(point for point in found.points if point.policy == "LRU")
    assert lru.first_difference is not None
    assert "evicted" in lru.first_difference


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


def summary(**given: Any) -> Summary:
    about: dict[str, Any] = {
        "median_error": 0.05, "p90_error": 0.1, "ranking": Ranking(concordant=9),
        "stalled": 1, "equal": True,
    }  # fmt: skip
    return Summary(**(about | given))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"median_error": 0.11}, "median_error is 11.0%, above 10.0%"),
        ({"p90_error": 0.21}, "p90_error is 21.0%, above 20.0%"),
        ({"ranking": Ranking(9, 1)}, "kendall_tau is 0.800, below 0.9"),
        ({"equal": False}, "decisions or bytes differ"),
    ],
)
def test_what_is_missed_is_named(wrong: dict[str, Any], text: str) -> None:
    config = ValidateConfig(name="x", base={}, policies=["on-demand"], capacity={"dram": ["9 %"]})

    assert missed(config, summary()) == []
    (found,) = missed(config, summary(**wrong))
    assert found.startswith(text)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("pace=fast", "pace"),
        ("policies=[nonsense]", "unknown policy 'nonsense'"),
        ("capacity={dram: [8 %], hbm: [8 %]}", "capacity"),
        ("repeats=0", "repeats"),
        ("base.trace=x.parquet", "one routing source"),
    ],
)
def test_what_is_wrong_is_named(override: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=problem):
        validate(load_validation(find_file(SMALL), [*QUICK, override]), tmp_path, bar=no_bar)
