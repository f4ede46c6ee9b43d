"""Calibrating for real, with tiny sizes: structure and refusals, never how fast this machine is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter_ns, sleep
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moetier.experiments.cli import app  # noqa: E402
from moetier.sim.hardware import load_profile  # noqa: E402
from moetier.sim.policy.precision.bit_sliced import BitSliced  # noqa: E402
from moetier.sim.policy.precision.channels import Channels  # noqa: E402
from moetier.sim.policy.precision.uniform import Uniform  # noqa: E402
from moetier.sim.run import Setting, simulate  # noqa: E402
from moetier.traces.batch import LayerBatch  # noqa: E402
from moetier.traces.channels import channel_cost  # noqa: E402
from moetier.traces.errors import InputError  # noqa: E402
from moetier.traces.formats import bit_slice_bytes  # noqa: E402
from moetier.traces.geometry import Geometry  # noqa: E402
from moetier.traces.synthetic import Synthetic  # noqa: E402
from moetier.validate.calibrate import disk  # noqa: E402
from moetier.validate.calibrate.device import DensePoint  # noqa: E402
from moetier.validate.calibrate.measure import TOKENS  # noqa: E402
from moetier.validate.calibrate.run import calibrate, open_device  # noqa: E402
from moetier.validate.calibrate.ways import kernel_name  # noqa: E402
from moetier.validate.identity import check_identity  # noqa: E402
from moetier.validate.machines.pacing import Pace  # noqa: E402

GEOMETRY = Geometry(
    name="small", n_experts=8, top_k=2, moe_layers=[1, 2, 3], n_layers=4, hidden=64,
    moe_intermediate=32, dense_intermediate=64, heads=4, kv_heads=2, head_dim=16, vocab=256,
)  # fmt: skip
SMALL: dict[str, Any] = {"file_bytes": 1 << 22}


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    before, threads = set(threading.enumerate()), torch.get_num_threads()
    yield
    left = [t for t in threading.enumerate() if t not in before and t.name.startswith("moetier")]

    assert left == []
    assert not list(tmp_path.glob(".*"))
    assert torch.get_num_threads() == threads


@pytest.mark.slow
def test_a_profile_of_this_machine_simulates_and_is_of_this_machine(tmp_path: Path) -> None:
    out = tmp_path / "here.yaml"
    pace = Pace(50_000_000)
    profile = calibrate(
        "disk", out, GEOMETRY, folder=tmp_path, seconds=2, lanes=2, pace=pace, threads=1, **SMALL
    )
    source = Synthetic(GEOMETRY, prompt=4, tokens=6)
    result = simulate(source, Setting(profile, "on-demand", capacity={"dram": 8 * 12288}))
    compute = profile.main_compute

    assert load_profile(out) == profile
    assert profile.name == "here"
    assert [row.tokens for row in compute.experts] == list(TOKENS)
    assert {row.nbytes for row in compute.experts} == {12288}
    assert {row.phase for row in compute.dense} == {"decode", "prefill"}
    assert compute.experts[-1].time > compute.experts[0].time // 2  # 128 tokens against one
    assert compute.host_time_per_layer > 0
    assert profile.links[0].lanes == 2
    assert profile.links[0].bandwidth.peak <= 2.3 * pace.rate
    assert result.metrics["tpot_ms"] > 0
    assert not any("roofline" in text for text in result.known_limitations)
    assert any("was calibrated on one machine" in text for text in result.known_limitations)
    check_identity(profile, tmp_path, {"threads": "1", "format": "bf16"})


def test_dense_rows_are_of_one_layer_with_and_without_the_head(tmp_path: Path) -> None:
    """Layer 0 has no experts and goes with layer 1, the output head with the last."""
    with disk.disk_device(GEOMETRY, "bf16", tmp_path, **SMALL) as device:
        body, last = device.dense_bytes(False), device.dense_bytes(True)

    assert body is not None
    assert last is not None
    assert last - body == pytest.approx(2 * 64 * 256, abs=2 * 64 * 256 // 2)


def test_lanes_may_change_between_repeats(tmp_path: Path) -> None:
    with disk.disk_device(GEOMETRY, "bf16", tmp_path, lanes=2, **SMALL) as device:
        took = [device.copy(n, lanes) for n in (4096, 65536) for lanes in (1, 2, 1)]
        with device.copying():
            took.append(device.experts(next(iter(device.kernels)), 3, 2))
        with device.computing():
            took.append(device.copy(4096, 2))

    assert min(took) > 0


def test_a_pace_that_the_disk_does_not_keep_is_refused(tmp_path: Path) -> None:
    pace = Pace(1 << 50)
    with disk.disk_device(GEOMETRY, "bf16", tmp_path, pace=pace, **SMALL) as device:
        device.copy(65536, 1)
        with pytest.raises(InputError, match=r"pace: the disk does not keep .* 100.0% of the byte"):
            device.remarks()


def test_a_pace_that_is_kept_is_said(tmp_path: Path) -> None:
    with disk.disk_device(GEOMETRY, "bf16", tmp_path, pace=Pace(10**5), **SMALL) as device:
        took = device.copy(4096, 1)
        said = device.remarks()

    assert took >= 40_960_000
    assert said[1].startswith("each lane held to 100 kB/s; ")


def test_a_failure_leaves_no_file_and_no_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(disk.DiskDevice, "experts", fail)
    with pytest.raises(KeyboardInterrupt):
        calibrate(
            "disk", tmp_path / "x.yaml", GEOMETRY, folder=tmp_path, seconds=0.01, lanes=1, **SMALL
        )

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"weights": "q4_0"}, "weights: experts stored as q4_0"),
        ({"seconds": 0}, "seconds: 0 seconds"),
        ({"out": "x.txt"}, "a profile is a YAML file; call it x.yaml"),
        ({"out": "no/where.yaml"}, "does not exist; create it first"),
        ({"machine": "abacus"}, "unknown machine 'abacus'; known: disk, cuda"),
        ({"file_bytes": 1 << 60}, "1048576 TiB are needed"),
        ({"folder": "nowhere"}, "nowhere: cannot be used"),
    ],
)
def test_what_cannot_work_is_refused(given: dict[str, Any], problem: str, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"machine": "disk", "out": "x.yaml", "folder": ""} | SMALL | given
    asked["out"], asked["folder"] = tmp_path / asked["out"], tmp_path / asked["folder"]

    with pytest.raises(InputError, match=problem):
        calibrate(geometry=GEOMETRY, **asked)

    assert list(tmp_path.iterdir()) == []


def test_cuda_is_refused_where_torch_sees_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(InputError, match="sees no CUDA device"):
        open_device("cuda", GEOMETRY, "bf16", Path())


def test_the_command_passes_on_what_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from moetier.validate.calibrate import run

    seen: dict[str, Any] = {}

    def record(machine: str, out: Path, geometry: Geometry, *rest: Any, **given: Any) -> None:
        seen.update(given, machine=machine, out=out, model=geometry.name)

    monkeypatch.setattr(run, "calibrate", record)
    out = str(tmp_path / "p.yaml")
    asked = ["--machine", "disk", "--out", out, "--pace", "100 MB/s", "--lanes", "2"]
    done = CliRunner().invoke(app, ["calibrate", *asked, "--model", "olmoe-1b-7b"])

    assert (done.exit_code, done.stdout.strip()) == (0, out)
    assert (seen["machine"], seen["lanes"], seen["pace"]) == ("disk", 2, Pace(100_000_000))
    assert CliRunner().invoke(app, ["calibrate", *asked, "--model", "none"]).exit_code == 2


def test_each_way_of_a_precision_is_timed_by_its_bytes(tmp_path: Path) -> None:
    parts = [BitSliced(bits=(8, 4), group=32), Uniform(bits=4, group=32)]
    with disk.disk_device(GEOMETRY, "bf16", tmp_path, lanes=1, precisions=parts, **SMALL) as device:
        took = {name: device.experts(name, 2, 1) for name in device.kernels}

    msb, lsb = bit_slice_bytes(GEOMETRY, 8, 4, 32)
    sizes = [(kernel_name(name), nbytes) for name, nbytes in device.kernels.items()]
    assert ("bit-sliced-8-4", msb) in sizes
    assert ("bit-sliced-8-4", msb + lsb) in sizes
    assert [kernel for kernel, _ in sizes].count("codes-4") == 1
    assert sizes[0][0] == "whole"
    assert min(took.values()) > 0


def test_experts_are_timed_right_after_copies_landed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk.disk_device(GEOMETRY, "bf16", tmp_path, lanes=2, **SMALL) as device:
        kernel = next(iter(device.kernels))
        device.experts(kernel, 3, 1)
        lanes = device._lane_set(device.kernels[kernel], 2)
        served = [lanes.served]
        device.experts(kernel, 3, 1)
        served.append(lanes.served)
        device.dense(DensePoint("decode", False, 1, 8))
        served.append(lanes.served)
        monkeypatch.setattr(device, "_read", None)  # none of its own where all lanes are busy
        with device.copying():
            begun = lanes.served
            took = device.experts(kernel, 3, 1)

    assert served == [2, 4, 6]  # one on each lane
    assert begun > 6
    assert took > 0


def test_only_compute_is_timed(tmp_path: Path) -> None:
    """A pace that makes copies slow makes no compute slow."""
    pace = Pace(1_000_000, 60_000_000)
    with disk.disk_device(GEOMETRY, "bf16", tmp_path, lanes=1, pace=pace, **SMALL) as device:
        kernel = next(iter(device.kernels))
        begin = perf_counter_ns()
        took = min(device.experts(kernel, 2, 1) for _ in range(4))
        dense = min(device.dense(DensePoint("decode", False, 1, 8)) for _ in range(4))
        passed = perf_counter_ns() - begin

    assert passed > 8 * 60_000_000
    assert max(took, dense) < 60_000_000


def test_a_dense_part_is_timed_after_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk.disk_device(GEOMETRY, "bf16", tmp_path, lanes=1, **SMALL) as device:
        asked: list[tuple[str, int, int]] = []
        usual = device.experts

        def experts(*way: Any) -> int:
            asked.append(way)
            return usual(*way)

        monkeypatch.setattr(device, "experts", experts)
        device.dense(DensePoint("prefill", False, 16, 136))

    assert asked == [(next(iter(device.kernels)), GEOMETRY.top_k, 1)]


def test_host_time_is_without_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moetier.validate.machines.dense import Dense

    usual = Dense.run

    def slow(self: Dense, batch: LayerBatch, x: Any) -> None:
        usual(self, batch, x)
        sleep(0.02)

    monkeypatch.setattr(Dense, "run", slow)
    with disk.disk_device(GEOMETRY, "bf16", tmp_path, lanes=1, **SMALL) as device:
        found = sorted(device.host() for _ in range(20))

    assert 0 < found[10] < 10_000_000


CHANNELS: dict[str, Any] = {"reads": "150 %", "recovery": "none"}  # rows are short beside a sector


@pytest.mark.parametrize("unit", [{}, {"unit": "block", "blocks": 4}])
def test_channels_are_timed_by_the_bytes_that_are_read(tmp_path: Path, unit: Any) -> None:
    pytest.importorskip("numba")
    part = Channels(**CHANNELS, **unit)
    cost = channel_cost(GEOMETRY)
    kept = cost.kept(part.reads)
    with disk.disk_device(
        GEOMETRY, "bf16", tmp_path, lanes=1, precisions=[part], **SMALL
    ) as device:
        took = {name: device.experts(name, 2, 3) for name in device.kernels}

    sizes = {nbytes for name, nbytes in device.kernels.items() if kernel_name(name) == "channels"}
    assert sizes == {cost.read_bytes(n) for n in (kept // 2, kept, cost.channels)}
    assert min(took.values()) > 0


def test_a_profile_with_channels_leaves_nothing_to_a_roofline(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    policy = {"precision": {"kind": "channels", **CHANNELS}}
    given: dict[str, Any] = {"folder": tmp_path, "seconds": 0.1, "lanes": 1, **SMALL}
    parts = [Channels(**CHANNELS)]
    source = Synthetic(GEOMETRY, prompt=1, tokens=6)
    said = []
    for precisions in ([], parts):
        out = tmp_path / f"{len(precisions)}.yaml"
        profile = calibrate("disk", out, GEOMETRY, **given, precisions=precisions)
        found = simulate(source, Setting(profile, policy, capacity={"dram": 8 * 12288}))
        said.append([text for text in found.known_limitations if "kernel 'channels'" in text])

    assert len(said[0]) == 1
    assert said[1] == []


@pytest.mark.parametrize(
    ("text", "kernel"),
    [
        ("{kind: uniform, bits: 3, group: 32}", "codes-3"),
        ('{"kind": "bit-sliced", "bits": [6, 3]}', "bit-sliced-6-3"),
        ("hobbit", "hobbit"),
        ("slicemoe", "bit-sliced-6-3"),  # a preset
    ],
)
def test_the_command_takes_precisions(
    text: str, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from moetier.validate.calibrate import run

    seen: list[str] = []

    def record(*_: Any, precisions: Any, **__: Any) -> None:
        seen.extend(part.kernel for part in precisions)

    monkeypatch.setattr(run, "calibrate", record)
    asked = ["calibrate", "--machine", "disk", "--out", str(tmp_path / "p.yaml"), "--precision"]
    done = CliRunner().invoke(app, [*asked, text, "--precision", "full"])
    wrong = CliRunner().invoke(app, [*asked, "nonsense"])

    assert done.exit_code == 0, done.output
    assert seen == [kernel, "whole"]
    assert wrong.exit_code == 2
    assert "--precision: policy.precision: unknown precision 'nonsense'" in wrong.stderr


def test_experts_are_timed_in_batches_of_what_a_token_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[int] = set()
    usual = disk.DiskDevice.experts

    def experts(self: Any, kernel: str, count: int, tokens: int) -> int:
        asked.add(count)
        return usual(self, kernel, count, tokens)

    monkeypatch.setattr(disk.DiskDevice, "experts", experts)
    three = GEOMETRY.model_copy(update={"top_k": 3})
    given: dict[str, Any] = {"folder": tmp_path, "seconds": 0.1, "lanes": 1, **SMALL}
    calibrate("disk", tmp_path / "p.yaml", three, **given)

    assert asked == {1, 3}
