"""`machine: cuda` in a comparison, on a fake device: decisions, layers that fit, and refusals."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="validation needs the extra 'models'")

from moetier.experiments.files import find_file  # noqa: E402
from moetier.experiments.validation import validate  # noqa: E402
from moetier.experiments.validation_config import ValidateConfig, load_validation  # noqa: E402
from moetier.experiments.verdict import Validation  # noqa: E402
from moetier.traces.errors import InputError  # noqa: E402
from moetier.validate.calibrate.cuda import PINNED_BYTES  # noqa: E402
from moetier.validate.machines.cuda.fake import NAME, FakeDevice  # noqa: E402
from moetier.validate.machines.pacing import Pace  # noqa: E402

CONFIG = "experiments/configs/validate-cuda.yaml"
QUICK = [
    "calibrate_seconds=1",
    "repeats=1",
    "base.synthetic.geometry=moe-small",
    "base.synthetic.layers=2",
    "base.synthetic.tokens=4",
    "base.synthetic.prompt=2",
    "tolerances={median_error: 1000, p90_error: 1000, kendall_tau: null}",
]
LAYER = 32 * 3 * 512 * 512 * 2  # bytes of the experts of a layer of moe-small


def no_bar(_: str) -> Any:
    return nullcontext(lambda done, total: None)


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    before, made = (
        set(threading.enumerate()),
        FakeDevice(device_bytes=4 << 30, pinned_bytes=4 << 30, pace=Pace(2_000_000_000)),
    )
    yield made
    left = [t for t in threading.enumerate() if t not in before and t.name.startswith("moetier")]
    lent = made.lent
    made.close()

    assert left == []
    assert lent == 0


def run(config: ValidateConfig, out: Path, device: FakeDevice) -> Validation:
    return validate(config, out, bar=no_bar, device=device)


@pytest.mark.slow
def test_the_grid_of_the_config_decides_as_simulated(tmp_path: Path, device: FakeDevice) -> None:
    found = run(load_validation(find_file(CONFIG), QUICK), tmp_path, device)

    assert found.missed == []
    assert len(found.points) >= 12
    for point in found.points:
        assert point.decision_log_equal, point.first_difference
        assert point.bytes_equal
        assert not point.asks_lateness
    policies = {point.policy for point in found.points}
    assert {"speculation", "predicted", "previous token", "LRU", "Belady"} <= policies
    assert found.profile.identity is not None
    assert found.profile.identity["gpu"] == NAME
    assert list(found.profile.tiers) == ["hbm", "dram"]
    assert any(NAME in text for text in found.known_limitations)


@pytest.mark.slow
def test_fewer_layers_are_run_where_more_do_not_fit(tmp_path: Path) -> None:
    room = PINNED_BYTES + 3 * LAYER + LAYER // 2
    small = FakeDevice(device_bytes=4 << 30, pinned_bytes=room, pace=Pace(4_000_000_000))
    few = ["base.synthetic.layers=8", "capacity.hbm=[25 %]", "policies=[{name: LRU}]"]
    config = load_validation(find_file(CONFIG), [*QUICK, *few])
    found = run(config, tmp_path, small)
    small.close()

    assert "only the first 3 of 8 MoE layers: more do not fit here" in found.known_limitations
    assert found.missed == []


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("pace=100 MB/s", "pace: copies to a GPU are not held to a pace"),
        ("policies=[{precision: {kind: channels, reads: 60 %, recovery: none}}]", "for the CPU"),
        ("capacity={dram: [8 %]}", "dram"),
    ],
)
def test_what_a_gpu_cannot_do_is_refused(
    override: str, problem: str, tmp_path: Path, device: FakeDevice
) -> None:
    with pytest.raises(InputError, match=problem):
        run(load_validation(find_file(CONFIG), [*QUICK, override]), tmp_path, device)


def test_without_a_gpu_there_is_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(InputError, match="sees no CUDA device; use the disk machine, or"):
        validate(load_validation(find_file(CONFIG)), tmp_path, bar=no_bar)
