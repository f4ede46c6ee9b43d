"""A model whose experts live in pinned memory says, bit by bit, what it said before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from moetier.sim.plan import LayerPlan
from moetier.sim.records import Columns
from moetier.sim.run import Setting
from moetier.sim.testing import toy_profile
from moetier.traces.capture.load import load_model
from moetier.traces.errors import InputError
from moetier.traces.samples import moe_tiny_path
from moetier.traces.samples.tasks import held_out_items
from moetier.validate.compare.decisions import Decisions
from moetier.validate.compare.grid import BYTES
from moetier.validate.evaluate import Evaluation, Loaded, evaluate
from moetier.validate.evaluate_arms import Extras
from moetier.validate.machines import live_model
from moetier.validate.machines.cuda.fake import NAME, FakeDevice
from moetier.validate.machines.cuda.live import OnDevice
from moetier.validate.machines.pacing import Pace

Devices = Callable[..., FakeDevice]
BITS = {"kind": "bit-sliced", "bits": [8, 4], "theta": 0.25}
POLICIES: dict[str, Any] = {
    "lru": "on-demand",
    "previous-token": "previous-token",
    "warm": {"eviction": "lfu", "warmup": "last-layer"},
    "uniform": {"eviction": "lru", "precision": {"kind": "uniform", "bits": 3}},
    "degraded": {"eviction": "slice-aware", "precision": BITS, "miss": "degrade"},
    "hobbit": {"eviction": "lru", "precision": {"kind": "hobbit", "t1": 0.4, "t2": 0.8}},
    "skip": {"eviction": "static", "miss": "skip"},
}
LOSSLESS = ("lru", "previous-token", "warm")


@pytest.fixture(scope="module")
def tiny() -> Loaded:
    return Loaded(*load_model(str(moe_tiny_path())))


class Run:
    """A run and what could be seen of it."""

    def __init__(self, loaded: Loaded, policy: Any, how: OnDevice | None, **more: Any) -> None:
        """Ask two questions."""
        blocks: list[Columns] = []
        self.plans: list[LayerPlan] = []
        setting = Setting(toy_profile(), policy, {"hbm": Fraction(1, 4)}, **more.pop("more", {}))
        self.result: Evaluation = evaluate(
            loaded,
            setting,
            held_out_items(1)[:3],
            Extras(batch_size=more.pop("size", 1), long_prompts=0),
            machine=how,
            sinks=[blocks.append],
            on_plan=more.pop("on_plan", self.plans.append),
        )
        self.rows = {name: np.concatenate([b[name] for b in blocks]) for name in blocks[0]}


@pytest.fixture
def as_it_was(tiny: Loaded) -> Iterator[None]:
    """Whatever happens, the model computes as before."""
    ids = torch.tensor([[3, 4, 5, 6]])
    expected = tiny.model(input_ids=ids).logits
    yield

    assert torch.equal(tiny.model(input_ids=ids).logits, expected)
    assert all("forward" not in module.__dict__ for module in tiny.model.modules())


@pytest.mark.usefixtures("as_it_was")
@pytest.mark.parametrize(
    ("policy", "size"), [*((name, 1) for name in POLICIES), ("previous-token", 3), ("skip", 3)]
)
def test_tokens_decisions_and_bytes_are_those_of_a_simulated_run(
    policy: str, size: int, tiny: Loaded, device: Devices
) -> None:
    sim = Run(tiny, POLICIES[policy], None, size=size)
    real = Run(tiny, POLICIES[policy], OnDevice(device(pace=None)), size=size)

    assert real.result.outputs == sim.result.outputs  # tokens, likelihoods and logits
    assert real.result.failure is None
    assert real.result.metrics["lossless"] or policy not in LOSSLESS
    assert Decisions.of(sim.plans).first_difference(Decisions.of(real.plans)) is None
    for name in BYTES:
        assert real.rows[name].tolist() == sim.rows[name].tolist(), name


@pytest.mark.usefixtures("as_it_was")
def test_times_are_measured_and_the_device_is_named(tiny: Loaded, device: Devices) -> None:
    pace = Pace(400_000_000, 50_000)
    run = Run(tiny, "previous-token", OnDevice(device(pace=pace), lanes=2))
    rows = run.rows
    missed = rows["fetch_bytes"] > 0

    assert rows["start_ns"][1:].tolist() == rows["end_ns"][:-1].tolist()
    least = 50_000 + rows["fetch_bytes"][missed] / (2 * pace.rate) * 1e9
    assert (rows["copy_ns"][missed] >= least * 0.98).all()
    assert (rows["expert_ns"] > 0).all()
    said = " ".join(run.result.known_limitations)
    assert f"time is measured on {NAME}" in said
    assert "not measured" not in said


@pytest.mark.usefixtures("as_it_was")
def test_the_weights_are_gone_while_it_lasts(
    tiny: Loaded, device: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = [v for n, v in tiny.model.named_parameters() if ".experts." in n]
    gone: list[bool] = []

    def look(plan: LayerPlan) -> None:
        gone.append(all(bool(value.isnan().all()) for value in experts))

    Run(tiny, "on-demand", OnDevice(device(pace=None)), on_plan=look)

    assert gone
    assert all(gone)

    monkeypatch.setattr(live_model.Living, "_write", lambda *_: None)
    wrong = Run(tiny, "on-demand", OnDevice(device(pace=None)))
    assert "says it is lossless, but" in str(wrong.result.failure)


@pytest.mark.usefixtures("as_it_was")
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_whatever_stops_a_run_leaves_the_model_whole(
    error: type[BaseException], tiny: Loaded, device: Devices
) -> None:
    def stop(plan: LayerPlan) -> None:
        if plan.batch.step == 3:
            raise error

    with pytest.raises(error):
        Run(tiny, "previous-token", OnDevice(device(pace=None)), on_plan=stop)


@pytest.mark.usefixtures("as_it_was")
@pytest.mark.parametrize(
    ("given", "error", "problem"),
    [
        ({"pinned_bytes": 1 << 20}, InputError, "are needed on the host, and 1 MiB are free"),
        ({"device_bytes": 1 << 20}, InputError, "are needed on the device, and 1 MiB are free"),
        ({"fails": lambda n: RuntimeError("bad copy") if n == 9 else None}, RuntimeError, "bad"),
    ],
)
def test_what_goes_wrong_is_named(
    given: dict[str, Any], error: type[Exception], problem: str, tiny: Loaded, device: Devices
) -> None:
    with pytest.raises(error, match=problem):
        Run(tiny, "on-demand", OnDevice(device(pace=None, **given)))


def test_what_cannot_be_computed_there_is_refused(
    tiny: Loaded, device: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = device()
    monkeypatch.setattr(elsewhere, "torch", torch.device("meta"), raising=False)

    with pytest.raises(InputError, match=r"the model is on cpu, and the machine copies to meta"):
        Run(tiny, "on-demand", OnDevice(elsewhere))
    with pytest.raises(InputError, match="overlap: a model computes"):
        Run(tiny, "on-demand", OnDevice(device()), more={"overlap": True})


@pytest.mark.slow
def test_channels_are_refused(tiny: Loaded, device: Devices) -> None:
    channels = {"eviction": "lru", "precision": {"kind": "channels", "reads": "60 %", "rank": 4}}

    with pytest.raises(InputError, match="code for the CPU, and not on a device"):
        Run(tiny, channels, OnDevice(device()))
