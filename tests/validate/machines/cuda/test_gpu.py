"""What only a GPU can show: real copies, real overlap, its own arithmetic, its own counter.

`scripts/gpu_check` runs these. With MOETIER_GPU_CHECK=dry they run on a fake device, which says
that the tests themselves work, and nothing about a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from time import perf_counter_ns, sleep
from typing import Any

import pytest
import torch

from moetier.sim.plan import LayerPlan
from moetier.sim.run import Setting, simulate
from moetier.sim.testing import toy_profile
from moetier.traces.capture.load import load_model
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.traces.samples import moe_tiny_path
from moetier.traces.samples.tasks import held_out_items
from moetier.traces.synthetic import Synthetic
from moetier.validate.compare.decisions import Decisions
from moetier.validate.evaluate import Loaded, evaluate
from moetier.validate.evaluate_arms import Extras
from moetier.validate.machines.cuda.device import Device
from moetier.validate.machines.cuda.fake import FakeDevice
from moetier.validate.machines.cuda.live import OnDevice
from moetier.validate.machines.cuda.run import run_on_cuda
from moetier.validate.machines.cuda.torch_cuda import open_cuda
from moetier.validate.machines.pacing import Pace
from moetier.validate.machines.run import pack_synthetic, run_on_disk

DRY = os.environ.get("MOETIER_GPU_CHECK") == "dry"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (DRY or torch.cuda.is_available()), reason="torch sees no CUDA device"),
]
PIECE = 1 << 20 if DRY else 64 << 20  # bytes
Keep = Callable[[list[torch.Tensor]], Callable[[Any], Any]]
SLICES = {"precision": {"kind": "bit-sliced", "bits": [8, 4], "theta": 0.25}}


@pytest.fixture
def gpu() -> Iterator[Device]:
    fake = FakeDevice(pace=Pace(1_000_000_000), counts_energy=True)
    device: Device = fake if DRY else open_cuda()
    yield device
    device.close()


def test_copies_arrive_whole_in_both_directions(gpu: Device) -> None:
    host, back = gpu.pinned(PIECE), gpu.pinned(PIECE)
    there = gpu.memory(PIECE)
    host.copy_(torch.randint(0, 256, (PIECE,), dtype=torch.uint8))
    stream = gpu.stream()
    stream.copy(there, host)
    stream.copy_back(back, there)
    stream.synchronise()
    stream.close()

    assert torch.equal(back, host)
    assert host.is_pinned() or DRY


def test_events_order_streams_and_measure_copies(gpu: Device) -> None:
    host, there, stream = gpu.pinned(PIECE), gpu.memory(PIECE), gpu.stream()
    stream.copy(there, host)
    stream.synchronise()
    begin = perf_counter_ns()
    first = stream.record()
    stream.copy(there, host)
    last = stream.record()
    last.wait()
    took = perf_counter_ns() - begin
    stream.close()

    assert first.done()
    assert last.done()
    assert 0 < last.since(first) <= took
    assert last.since(first) > PIECE * 1_000_000_000 // 200_000_000_000  # no link is that fast


def test_a_copy_goes_on_while_the_device_computes(gpu: Device) -> None:
    """Both begun together, their ends are closer to the longer than to the sum."""
    host, there = gpu.pinned(4 * PIECE), gpu.memory(4 * PIECE)
    copies, compute = gpu.stream(), gpu.stream()
    n = 256 if DRY else 4096
    a = torch.ones(n, n, device=gpu.torch)

    def work() -> None:
        with compute.running():
            for _ in range(4):
                torch.mm(a, a)
        compute.synchronise()

    def copy() -> None:
        copies.copy(there, host)
        copies.synchronise()

    def timed(*tasks: Callable[[], None]) -> int:
        begin = perf_counter_ns()
        for task in tasks:
            task()
        return perf_counter_ns() - begin

    work()  # kernels are chosen
    copy()
    alone = min(timed(work) + timed(copy) for _ in range(5))
    together = min(
        timed(lambda: copies.copy(there, host), work, copies.synchronise) for _ in range(5)
    )
    shorter = min(min(timed(work) for _ in range(5)), min(timed(copy) for _ in range(5)))
    copies.close()
    compute.close()

    assert together < alone - shorter // 4


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", ["on-demand", {"prefetch": "previous-token"}, SLICES], ids=str)
def test_decisions_are_those_of_a_simulation(
    policy: Any, overlap: bool, gpu: Device, geometry: Geometry, setting: Callable[..., Setting]
) -> None:
    source = Synthetic(geometry, prompt=6, tokens=12, skew=1.0, reuse=0.4, scores=True)
    plans: tuple[list[LayerPlan], list[LayerPlan]] = ([], [])
    simulate(source, setting(policy, 30, overlap=overlap), on_plan=plans[0].append)
    run_on_cuda(source, setting(policy, 30, overlap=overlap), gpu, on_plan=plans[1].append)

    assert Decisions.of(plans[0]).first_difference(Decisions.of(plans[1])) is None


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", ["on-demand", {"prefetch": "previous-token"}, SLICES], ids=str)
def test_outputs_are_those_of_the_cpu_up_to_rounding(
    policy: Any,
    overlap: bool,
    gpu: Device,
    geometry: Geometry,
    setting: Callable[..., Setting],
    keep: Keep,
    tmp_path: Path,
) -> None:
    source = Synthetic(geometry, prompt=6, tokens=8, skew=1.0, reuse=0.4, scores=True)
    chosen = setting(policy, 30, overlap=overlap)
    pack_synthetic(tmp_path / "same.slices", source, chosen, seed=0)
    outputs: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    run_on_cuda(source, chosen, gpu, around=keep(outputs[0]))
    run_on_disk(source, chosen, tmp_path / "same.slices", around=keep(outputs[1]))

    assert len(outputs[0]) == len(outputs[1]) > 0
    for found, expected in zip(*outputs, strict=True):
        scale = float(expected.float().abs().max())
        assert (
            float((found.float() - expected.float()).abs().max()) <= 0.02 * scale
        )  # bf16 keeps 8 bits


def test_what_is_computed_does_not_depend_on_when_it_came(
    gpu: Device, geometry: Geometry, setting: Callable[..., Setting], keep: Keep
) -> None:
    source = Synthetic(geometry, prompt=6, tokens=8, skew=1.0, reuse=0.4)
    sums: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for policy, into in zip(("on-demand", {"prefetch": "previous-token"}), sums, strict=True):
        run_on_cuda(source, setting(policy, 30), gpu, around=keep(into))

    assert len(sums[0]) > 0
    assert all(torch.equal(a, b) for a, b in zip(*sums, strict=True))


@pytest.mark.parametrize("policy", ["on-demand", "previous-token"])
def test_a_model_says_the_same_with_its_experts_in_pinned_memory(policy: str, gpu: Device) -> None:
    model, tokenizer = load_model(str(moe_tiny_path()))
    model.to(gpu.torch)
    found = evaluate(
        Loaded(model, tokenizer),
        Setting(toy_profile(), policy, {"hbm": Fraction(1, 4)}),
        held_out_items(1)[:3],
        Extras(long_prompts=0),
        machine=OnDevice(gpu),
    )

    assert found.failure is None
    assert found.metrics["lossless"]
    assert found.metrics["bytes_read_total"] > 0


def test_more_than_the_device_has_is_refused_with_the_bytes(gpu: Device) -> None:
    with pytest.raises(InputError, match=r"281474976710656 bytes\) are needed on the device"):
        gpu.memory(1 << 48)
    with pytest.raises(InputError, match=r"281474976710656 bytes\) are needed on the host"):
        gpu.pinned(1 << 48)

    gpu.release(gpu.pinned(PIECE))  # and after that all is well
    gpu.release(gpu.memory(PIECE))


def test_the_energy_counter_counts(gpu: Device) -> None:
    before = gpu.energy()
    if before is None:
        pytest.skip("no energy counter: is nvidia-ml-py installed?")
    sleep(gpu.energy_window / 1e9)
    after = gpu.energy()

    assert after is not None
    watts = (after - before) * 1000 / gpu.energy_window
    assert 5 < watts < 2000
