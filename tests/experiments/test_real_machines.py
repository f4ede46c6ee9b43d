"""Both machines of a comparison answer the same questions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="real machines need the extra 'models'")

from moetier.experiments.config import check_run
from moetier.experiments.real_machines import layout_key, open_machine
from moetier.experiments.runs import setting_of
from moetier.experiments.sources import open_source
from moetier.sim.policy.compose import compose
from moetier.sim.run import simulate
from moetier.traces.errors import InputError
from moetier.validate.calibrate.cuda import PINNED_BYTES
from moetier.validate.calibrate.stand_in import stand_in
from moetier.validate.compare.observe import Case, observe
from moetier.validate.machines.cuda.fake import NAME, FakeDevice
from moetier.validate.machines.cuda.run import CudaRuns
from moetier.validate.machines.pacing import Pace

KINDS = ("disk", "cuda")
LAYER = 32 * 3 * 512 * 512 * 2  # bytes of the experts of a layer of moe-small
BITS = {"precision": {"kind": "bit-sliced", "bits": [8, 4]}}


@contextmanager
def opened(kind: str, folder: Path, pinned_bytes: int = 4 << 30) -> Iterator[Any]:
    before = set(threading.enumerate())
    device = FakeDevice(device_bytes=2 << 30, pinned_bytes=pinned_bytes)
    with open_machine(kind, folder, lanes=2, device=device) as machine:
        yield machine
    lent = device.lent
    device.close()
    left = [t for t in threading.enumerate() if t not in before and t.name.startswith("moetier")]

    assert (lent, left) == (0, [])


def cases(tiers: tuple[str, str], *policies: Any, layers: int = 2) -> list[Case]:
    found = []
    for policy in policies:
        data = {
            "synthetic": {"geometry": "moe-small", "layers": layers, "tokens": 3},
            "hardware": "desktop-nvme", "policy": policy, "weights": "bf16",
        }  # fmt: skip
        run = check_run(data, "a test")
        profile = stand_in(dict.fromkeys(tiers))
        setting = setting_of(run, profile)
        setting = replace(setting, capacity={tiers[0]: 20 * LAYER // 32})
        found.append(Case(str(policy), {}, open_source(run).source, setting))
    return found


@contextmanager
def no_bar(_: str) -> Iterator[Any]:
    yield lambda done, total: None


@pytest.mark.parametrize("kind", KINDS)
def test_a_case_is_run_after_it_was_prepared_and_moves_what_a_simulation_moves(
    kind: str, tmp_path: Path
) -> None:
    with opened(kind, tmp_path) as machine:
        (case,) = cases(machine.tiers, {"eviction": "lru"})
        machine.prepare([case], no_bar)
        seen = observe(machine.run, case)
    expected = simulate(case.source, case.setting)

    assert seen.result.metrics["miss_rate"] == expected.metrics["miss_rate"]
    assert seen.result.metrics["bytes_read_total"] == expected.metrics["bytes_read_total"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_slices_are_stored_once_for_each_way(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as machine:
        chosen = cases(machine.tiers, {"eviction": "lru"}, {"eviction": "lfu"}, BITS)
        machine.prepare(chosen, no_bar)
        keys = {
            layout_key(compose(case.setting.policy, machine.tiers[:1]).precision) for case in chosen
        }
        files = list(tmp_path.iterdir())
        pinned = len(machine._runs._hosts) if kind == "cuda" else len(files)

    assert len(keys) == pinned == 2


@pytest.mark.parametrize("kind", KINDS)
def test_it_says_what_it_has(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as machine:
        room = machine.capacities()

        assert tuple(room) == machine.tiers
        assert all(nbytes > 0 for nbytes in room.values())
        assert machine.calibration["lanes"] == 2
        assert machine.layers(cases(machine.tiers, {"eviction": "lru"})) == 2
        assert machine.facts["gpu" if kind == "cuda" else "threads"] in (NAME, "1")
        assert "date" not in machine.facts


def test_a_device_has_run_once_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    really = CudaRuns.run

    def noted(runs: CudaRuns, source: Any, setting: Any, **given: Any) -> Any:
        ran.append(setting.policy)
        return really(runs, source, setting, **given)

    monkeypatch.setattr(CudaRuns, "run", noted)
    with opened("cuda", tmp_path) as machine:
        machine.prepare(cases(machine.tiers, {"eviction": "lru"}, BITS), no_bar)

    assert ran == [{"eviction": "lru"}]


def test_layers_are_what_is_left_beside_calibration(tmp_path: Path) -> None:
    """Two ways of storing are pinned side by side, so fewer layers fit than of one."""
    with opened("cuda", tmp_path, pinned_bytes=PINNED_BYTES + 4 * LAYER) as machine:
        one = machine.layers(cases(machine.tiers, {"eviction": "lru"}, layers=8))
        both = machine.layers(cases(machine.tiers, {"eviction": "lru"}, BITS, layers=8))

    assert one == 4
    assert both == 2  # a layer in both ways takes 1.56 times as much

    with (
        opened("cuda", tmp_path, pinned_bytes=PINNED_BYTES) as machine,
        pytest.raises(InputError, match=r"one layer takes 48 MiB .* of pinned memory"),
    ):
        machine.layers(cases(machine.tiers, {"eviction": "lru"}))


def test_a_pace_is_of_a_disk(tmp_path: Path) -> None:
    pace = Pace(1_000_000)
    with (
        pytest.raises(InputError, match="not held to a pace"),
        open_machine("cuda", tmp_path, lanes=1, pace=pace, device=FakeDevice()),
    ):
        pass
    with open_machine("disk", tmp_path, lanes=1, pace=pace) as machine:
        assert machine.calibration == {"lanes": 1, "pace": pace, "threads": 1}
