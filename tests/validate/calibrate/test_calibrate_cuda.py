"""Calibrating the CUDA machine on a fake device: structure and refusals, never how fast it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moetier.sim.hardware import load_profile  # noqa: E402
from moetier.sim.policy.precision.bit_sliced import BitSliced  # noqa: E402
from moetier.sim.policy.precision.channels import Channels  # noqa: E402
from moetier.sim.policy.precision.uniform import Uniform  # noqa: E402
from moetier.sim.run import Setting, simulate  # noqa: E402
from moetier.traces.errors import InputError  # noqa: E402
from moetier.traces.formats import bit_slice_bytes  # noqa: E402
from moetier.traces.geometry import Geometry  # noqa: E402
from moetier.traces.synthetic import Synthetic  # noqa: E402
from moetier.validate.calibrate.cuda import CudaDevice, cuda_device  # noqa: E402
from moetier.validate.calibrate.device import DensePoint  # noqa: E402
from moetier.validate.calibrate.run import calibrate, open_device  # noqa: E402
from moetier.validate.calibrate.ways import kernel_name  # noqa: E402
from moetier.validate.identity import check_identity  # noqa: E402
from moetier.validate.machines.cuda.fake import NAME, FakeDevice  # noqa: E402
from moetier.validate.machines.pacing import Pace  # noqa: E402

GEOMETRY = Geometry(
    name="small", n_experts=8, top_k=2, moe_layers=[1, 2, 3], n_layers=4, hidden=64,
    moe_intermediate=32, dense_intermediate=64, heads=4, kv_heads=2, head_dim=16, vocab=256,
)  # fmt: skip
PACE = Pace(50_000_000, 20_000)
SMALL: dict[str, Any] = {"pinned_bytes": 1 << 22}
Devices = Callable[..., FakeDevice]


@pytest.fixture
def device() -> Iterator[Devices]:
    before, made = set(threading.enumerate()), []

    def make(**given: Any) -> FakeDevice:
        data: dict[str, Any] = {"pace": PACE}
        made.append(FakeDevice(**(data | given)))
        return made[-1]

    yield make
    left = [t for t in threading.enumerate() if t not in before and t.name.startswith("moetier")]
    lent = [one.lent for one in made]
    for one in made:
        one.close()

    assert left == []
    assert lent == [0] * len(made)


@pytest.mark.slow
def test_a_profile_of_the_device_simulates_and_is_of_it(tmp_path: Path, device: Devices) -> None:
    out, mine = tmp_path / "gpu.yaml", device(counts_energy=True, energy_window=10_000_000)
    profile = calibrate("cuda", out, GEOMETRY, seconds=2, lanes=2, device=mine, **SMALL)
    source = Synthetic(GEOMETRY, prompt=4, tokens=6)
    result = simulate(source, Setting(profile, "on-demand", capacity={"hbm": 8 * 12288}))
    link = profile.links[0]

    assert load_profile(out) == profile
    assert (link.src, link.dst, link.lanes) == ("dram", "hbm", 2)
    assert link.bandwidth.peak <= 2.3 * PACE.rate
    assert list(profile.tiers) == ["hbm", "dram"]
    back = profile.link("hbm", "dram")
    assert back.bandwidth.peak <= 2.3 * PACE.rate
    assert "writing" in back.source
    assert profile.identity is not None
    assert profile.identity["gpu"] == NAME
    assert not {"file system", "device", "threads"} & set(profile.identity)
    assert profile.static_power == pytest.approx(50_000_000, rel=0.05)  # microwatts, as it says
    assert NAME in link.source
    assert result.metrics["tpot_ms"] > 0
    assert not any("roofline" in text for text in result.known_limitations)
    check_identity(profile, tmp_path, {"gpu": NAME, "format": "bf16"})
    with pytest.raises(InputError, match="gpu is unknown here and was fake device"):
        check_identity(profile, tmp_path)


def test_a_device_that_counts_no_energy_has_no_power(tmp_path: Path, device: Devices) -> None:
    out, mine = tmp_path / "gpu.yaml", device(energy_window=1)
    profile = calibrate("cuda", out, GEOMETRY, seconds=0.01, lanes=1, device=mine, **SMALL)

    assert profile.static_power == 0
    assert "no energy counter" in (profile.notes or "")


def test_what_is_timed_is_copied_and_computed(device: Devices) -> None:
    mine = device()
    with cuda_device(GEOMETRY, "bf16", device=mine, lanes=2, **SMALL) as found:
        copied = [found.copy(n, lanes) for n in (4096, 65536) for lanes in (1, 2, 1)]
        done = mine.copies
        with found.copying():
            beside = found.experts(next(iter(found.kernels)), 3, 2)
        with found.computing():
            copied.append(found.copy(4096, 2))
        dense = found.dense(DensePoint("decode", True, 1, 512))
        host = found.host()

    assert done == 4 * 2 * (1 + 2 + 1)
    assert all(took >= 0.99 * PACE.ns(4096) for took in copied)
    assert copied[3] >= 0.99 * PACE.ns(65536)
    assert min(beside, dense) > 0
    assert host >= 0


def test_each_way_of_a_precision_is_timed_by_its_bytes(device: Devices) -> None:
    parts = [BitSliced(bits=(8, 4), group=32), Uniform(bits=4, group=32)]
    with cuda_device(GEOMETRY, "bf16", device=device(), precisions=parts, **SMALL) as found:
        took = [found.experts(name, 2, 1) for name in found.kernels]
        sizes = [(kernel_name(name), nbytes) for name, nbytes in found.kernels.items()]

    msb, lsb = bit_slice_bytes(GEOMETRY, 8, 4, 32)
    assert ("bit-sliced-8-4", msb) in sizes
    assert ("bit-sliced-8-4", msb + lsb) in sizes
    assert sizes[0][0] == "whole"
    assert min(took) > 0


def test_a_failure_leaves_nothing_behind(
    tmp_path: Path, device: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(CudaDevice, "dense", fail)
    with pytest.raises(KeyboardInterrupt):
        calibrate(
            "cuda", tmp_path / "x.yaml", GEOMETRY, seconds=0.01, lanes=1, device=device(), **SMALL
        )

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"weights": "q4_0"}, "q4_0 need a kernel of their own"),
        ({"pace": PACE}, "pace: copies to a GPU are not held to a pace"),
        ({"pinned_bytes": 1 << 40}, "1 TiB .* are needed on the host"),
        ({"precisions": [Channels("60 %", recovery="none")]}, "code for the CPU"),
        ({"few": {"device_bytes": 100_000}}, "are needed on the device"),
    ],
)
def test_what_cannot_work_is_refused(
    given: dict[str, Any], problem: str, tmp_path: Path, device: Devices
) -> None:
    asked: dict[str, Any] = {"lanes": 1} | SMALL | given
    mine = device(**asked.pop("few", {}))

    with pytest.raises(InputError, match=problem):
        calibrate("cuda", tmp_path / "x.yaml", GEOMETRY, seconds=0.01, device=mine, **asked)

    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu_there_is_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(InputError, match=r"sees no CUDA device; use the disk machine, or"):
        open_device("cuda", GEOMETRY, "bf16", Path())


def test_bytes_come_back_over_every_lane(device: Devices) -> None:
    mine = device()
    with cuda_device(GEOMETRY, "bf16", device=mine, **SMALL) as found:
        free, took = mine.free(), [found.copy_back(65536, lanes) for lanes in (1, 2)]
        again = found.copy_back(65536, 2)

        assert mine.copies == 4 * (1 + 2 + 2)
        assert mine.free() == free - 2 * 65536  # what was taken once is taken again

    assert all(ns >= 0.99 * PACE.ns(65536) for ns in (*took, again))
