"""A model whose experts really live in a file says, bit by bit, what it said before."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from moetier.sim.machine.base import Span
from moetier.sim.plan import LayerPlan
from moetier.sim.records import Columns
from moetier.sim.run import Setting
from moetier.sim.testing import toy_profile
from moetier.traces.capture.load import load_model
from moetier.traces.errors import InputError
from moetier.traces.samples import moe_tiny_path
from moetier.traces.samples.tasks import held_out_items
from moetier.validate.evaluate import Evaluation, Loaded, evaluate
from moetier.validate.evaluate_arms import Extras
from moetier.validate.machines import live_model
from moetier.validate.machines.live_disk import OnDisk
from moetier.validate.machines.live_machine import LiveMachine, RealDriver
from moetier.validate.machines.pacing import Pace
from moetier.validate.machines.slices_file import SlicesFile
from moetier.validate.machines.slots import Slot

BITS = {"kind": "bit-sliced", "bits": [8, 4], "theta": 0.25}
BLOCKS = {"kind": "channels", "reads": "60 %", "unit": "block", "blocks": 16, "rank": 4}
LOSSLESS: dict[str, Any] = {
    "lru": "on-demand",
    "previous-token": "previous-token",
    "static": {"eviction": "static"},
    "warm": {"eviction": "lfu", "warmup": "last-layer"},
    "uncached": "on-demand-uncached",
    "predicted": {"prefetch": {"kind": "predicted", "predictor": "router-reuse"}},
}
LOSSY: dict[str, Any] = {
    "uniform": {"eviction": "lru", "precision": {"kind": "uniform", "bits": 3}},
    "degraded": {"eviction": "slice-aware", "precision": BITS, "miss": "degrade"},
    "hobbit": {"eviction": "lru", "precision": {"kind": "hobbit", "t1": 0.4, "t2": 0.8}},
    "cache-prior": {"eviction": "lru", "routing": "cache-prior"},
    "skip": {"eviction": "static", "miss": "skip"},
    "channels": {"eviction": "lru", "precision": {"kind": "channels", "reads": "60 %", "rank": 4}},
    "blocks": {"eviction": "lru", "precision": BLOCKS},
}
TIMING = {"start_ns", "end_ns", "dense_ns", "wait_ns", "copy_ns", "expert_ns",
          "late_hits", "dropped_bytes"}  # fmt: skip


@pytest.fixture(scope="module")
def tiny() -> Loaded:
    return Loaded(*load_model(str(moe_tiny_path())))


@dataclass
class Seen:
    """A run and what could be seen of it."""

    result: Evaluation
    plans: list[LayerPlan] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    rows: Columns = field(default_factory=dict)


def setting(policy: Any, share: int = 25, **more: Any) -> Setting:
    return Setting(toy_profile(), policy, {"hbm": Fraction(share, 100)}, **more)


def run(loaded: Loaded, policy: Any, disk: OnDisk | None, *, size: int = 1, **more: Any) -> Seen:
    blocks: list[Columns] = []
    plans: list[LayerPlan] = []
    spans: list[Span] = []
    predicted = "router-reuse" if "router-reuse" in str(policy) else None
    result = evaluate(
        loaded,
        setting(policy),
        more.pop("items", None) or held_out_items(1)[: 3 if size > 1 else 2],
        Extras(batch_size=size, long_prompts=1, long_tokens=8),
        machine=disk,
        predictor=predicted,
        sinks=[blocks.append],
        on_plan=more.pop("on_plan", plans.append),
        on_span=spans.append,
        **more,
    )
    rows = {name: np.concatenate([b[name] for b in blocks]) for name in blocks[0]}
    return Seen(result, plans, spans, rows)


def log_of(plans: list[LayerPlan]) -> list[object]:
    return [
        (p.batch.step, p.batch.layer, p.needed, p.missing, p.fetch, list(p.prefetch), list(p.skip),
         list(p.degrade), list(p.evicted), list(p.replaced), p.spared, p.resident)
        for p in plans
    ]  # fmt: skip


LONG = ("channels", "blocks")  # their sketches take a second
CASES = [(name, 1) for name in LOSSLESS | LOSSY if name not in LONG]
CASES += [(name, 3) for name in ("lru", "previous-token", "degraded", "skip")]
SLOW = [pytest.param(name, size, marks=pytest.mark.slow) for name in LONG for size in (1, 3)]


@pytest.mark.parametrize(("policy", "size"), [*CASES, *SLOW])
def test_tokens_logits_decisions_and_bytes_are_those_of_a_simulated_run(
    policy: str, size: int, tiny: Loaded
) -> None:
    chosen = (LOSSLESS | LOSSY)[policy]
    sim, real = run(tiny, chosen, None, size=size), run(tiny, chosen, OnDisk(), size=size)

    assert real.result.outputs == sim.result.outputs  # tokens, likelihoods and logits
    assert real.result.long_outputs == sim.result.long_outputs
    for key in ("accuracy", "nll", "repetition_share", "lossless"):
        assert real.result.metrics[key] == sim.result.metrics[key]
    assert real.result.failure is None
    assert real.result.metrics["lossless"] or policy in LOSSY
    assert log_of(real.plans) == log_of(sim.plans)
    for name in sim.rows.keys() - TIMING:
        if not name.startswith("energy"):  # energy follows time
            assert real.rows[name].tolist() == sim.rows[name].tolist(), name


@pytest.mark.parametrize("kind", ["window-aware", "previous-token"])
def test_a_policy_that_asks_for_lateness_loses_nothing(kind: str, tiny: Loaded) -> None:
    """Its decisions follow the real lanes, and so may differ; what the model says does not."""
    prefetch: dict[str, Any] = {"kind": "window-aware", "predictor": "router-reuse", "depth": [1]}
    if kind == "previous-token":
        prefetch = {"kind": "previous-token", "cancel": True}
    seen = run(tiny, {"eviction": "lru", "prefetch": prefetch}, OnDisk(pace=Pace(100_000_000)))

    assert seen.result.metrics["lossless"]
    assert seen.rows["prefetch_bytes"].sum() > 0


def test_times_are_measured_and_add_up(tiny: Loaded) -> None:
    rate = 200_000_000
    seen = run(tiny, "previous-token", OnDisk(lanes=2, pace=Pace(rate, 100_000)))
    rows = seen.rows

    assert rows["start_ns"][0] == 0
    assert rows["start_ns"][1:].tolist() == rows["end_ns"][:-1].tolist()
    whole = rows["dense_ns"] + rows["wait_ns"] + rows["expert_ns"]
    assert whole.tolist() == (rows["end_ns"] - rows["start_ns"]).tolist()
    for name in ("dense_ns", "wait_ns", "expert_ns"):
        assert (rows[name] >= 0).all()
    assert (rows["expert_ns"] > 0).all()
    assert rows["dense_ns"][0] > 0  # of the first layer too
    missed = rows["fetch_bytes"] > 0
    least = 100_000 + rows["fetch_bytes"][missed] / (2 * rate) * 1e9
    assert (rows["copy_ns"][missed] >= least * 0.99).all()

    moved = sum(s.info["bytes"] for s in seen.spans if s.lane.startswith("link"))  # type: ignore[misc]
    ordered = rows["fetch_bytes"].sum() + rows["prefetch_bytes"].sum()
    assert moved == ordered - rows["dropped_bytes"].sum()
    said = " ".join(seen.result.known_limitations)
    assert "time is measured on this machine" in said
    assert "not measured" not in said


@pytest.mark.slow
def test_nothing_is_read_but_what_was_ordered(tiny: Loaded, monkeypatch: Any) -> None:
    aside: list[int] = []
    really = SlicesFile.read_aside

    def noted(file: SlicesFile, slice_id: int) -> Slot:
        aside.append(slice_id)
        return really(file, slice_id)

    monkeypatch.setattr(SlicesFile, "read_aside", noted)
    for policy in ("static", "previous-token", "degraded", "skip", "blocks"):
        run(tiny, (LOSSLESS | LOSSY)[policy], OnDisk(), items=held_out_items(1)[:1])

        assert aside == [], policy

    run(tiny, "on-demand", OnDisk(), size=3)

    assert aside  # what padding computes


def test_the_weights_are_gone_while_it_lasts_and_back_afterwards(
    tiny: Loaded, monkeypatch: Any
) -> None:
    before = {name: value.clone() for name, value in tiny.model.state_dict().items()}
    experts = [v for n, v in tiny.model.named_parameters() if ".experts." in n]
    where = [value.data_ptr() for value in experts]
    gone: list[bool] = []

    def look(plan: LayerPlan) -> None:
        gone.append(all(bool(value.isnan().all()) for value in experts))

    run(tiny, "on-demand", OnDisk(), on_plan=look)

    assert gone
    assert all(gone)
    after = tiny.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert [value.data_ptr() for value in experts] == where
    for module in tiny.model.modules():
        assert "forward" not in module.__dict__

    # A run that computes without what it read is found out.
    monkeypatch.setattr(live_model.Living, "_write", lambda *_: None)
    wrong = run(tiny, "on-demand", OnDisk())
    assert "says it is lossless, but" in str(wrong.result.failure)


def folder_of(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def test_the_file_is_in_the_folder_and_is_removed(tiny: Loaded, tmp_path: Path) -> None:
    seen: list[list[str]] = []
    run(
        tiny,
        "on-demand",
        OnDisk(folder=tmp_path),
        on_plan=lambda _: seen.append(folder_of(tmp_path)),
    )

    assert len(seen[0]) == 1
    assert seen[0][0].startswith("moetier-")
    assert folder_of(tmp_path) == []


def cut(path: Path) -> None:
    os.truncate(path, 4096)


def change(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"something else")
    os.utime(path, ns=(1, 1))


def fails_at(step: int, harm: Callable[[], None]) -> Callable[[LayerPlan], None]:
    def on_plan(plan: LayerPlan) -> None:
        if (plan.batch.step, plan.batch.layer) == (step, 2):
            harm()

    return on_plan


@pytest.fixture
def as_it_was(tiny: Loaded, tmp_path: Path) -> Iterator[None]:
    """Whatever happens, the model computes as before, and no file is left."""
    ids = torch.tensor([[3, 4, 5, 6]])
    expected = tiny.model(input_ids=ids).logits
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    yield
    gc.collect()

    assert torch.equal(tiny.model(input_ids=ids).logits, expected)
    assert folder_of(tmp_path) == []
    assert len(list(Path("/proc/self/fd").iterdir())) <= open_before


@pytest.mark.usefixtures("as_it_was")
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (cut, "has 4096 bytes, and had"),
        (change, "was written to since it was opened"),
        (Path.unlink, "was removed or replaced"),
    ],
)
def test_harm_to_the_file_in_mid_run_is_named(
    harm: Callable[[Path], None], said: str, tiny: Loaded, tmp_path: Path
) -> None:
    def hurt() -> None:
        harm(next(tmp_path.glob("*/experts.slices")))

    with pytest.raises(InputError, match=f"experts.slices: {said}"):
        run(tiny, "on-demand", OnDisk(folder=tmp_path), on_plan=fails_at(3, hurt))


@pytest.mark.usefixtures("as_it_was")
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError, MemoryError])
def test_whatever_stops_a_run_leaves_the_model_whole(
    error: type[BaseException], tiny: Loaded, tmp_path: Path
) -> None:
    def stop() -> None:
        raise error

    with pytest.raises(error):
        run(tiny, "previous-token", OnDisk(folder=tmp_path), on_plan=fails_at(3, stop))


@pytest.mark.usefixtures("as_it_was")
def test_a_lane_that_dies_is_heard_of(tiny: Loaded, tmp_path: Path, monkeypatch: Any) -> None:
    really, count = SlicesFile.read, []

    def dies(file: SlicesFile, slice_id: int, slot: Any) -> None:
        count.append(slice_id)
        if len(count) == 40:
            raise ZeroDivisionError("a bug")
        really(file, slice_id, slot)

    monkeypatch.setattr(SlicesFile, "read", dies)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run(tiny, "on-demand", OnDisk(folder=tmp_path))


@pytest.mark.usefixtures("as_it_was")
def test_a_full_disk_names_the_bytes(tiny: Loaded, tmp_path: Path, monkeypatch: Any) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    with pytest.raises(
        InputError, match=r"the slices take 24 MiB \(25165824 bytes\), and the disk"
    ):
        run(tiny, "on-demand", OnDisk(folder=tmp_path))


@pytest.mark.usefixtures("as_it_was")
def test_too_little_memory_names_the_bytes(tiny: Loaded, tmp_path: Path, monkeypatch: Any) -> None:
    from moetier.validate.machines import slots

    monkeypatch.setattr(slots, "free_memory", lambda: 1 << 20)
    with pytest.raises(InputError, match="MiB are needed, and 1 MiB of memory are free"):
        run(tiny, "on-demand", OnDisk(folder=tmp_path))


def test_what_a_model_cannot_do_is_refused(tiny: Loaded) -> None:
    items = held_out_items(1)[:1]
    with pytest.raises(InputError, match="a model computes the experts of a layer in one call"):
        evaluate(tiny, replace(setting("on-demand"), overlap=True), items, machine=OnDisk())
    with pytest.raises(
        InputError, match="counts bytes of int8, and the experts are stored in bf16"
    ):
        evaluate(tiny, replace(setting("on-demand"), weights="int8"), items, machine=OnDisk())
    moved = tiny.model.state_dict()["model.layers.0.mlp.experts.down_proj"]
    kept = moved[3, 0, 0].clone()
    try:
        moved[3, 0, 0] = 0.123456789  # not a bf16
        with pytest.raises(InputError, match=r"weights change when they are stored as torch.bfl"):
            evaluate(tiny, setting("on-demand"), items, machine=OnDisk())
    finally:
        moved[3, 0, 0] = kept


class Numbers:
    """A tokenizer of texts that are numbers."""

    pad_token_id = 0

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """Return the ids in *text*."""
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids: list[int]) -> str:
        """Return *ids* as text."""
        return " ".join(map(str, ids))


def gpt_oss() -> Any:
    """Experts with biases, gate and up interleaved, stored transposed."""
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            intermediate_size=32, num_local_experts=8, num_experts_per_tok=2,
            max_position_embeddings=64, sliding_window=16,
        )
    )  # fmt: skip


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, intermediate_size=32,
            num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=64,
        )
    )  # fmt: skip


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", [gpt_oss, mixtral])
def test_other_families_and_implementations(family: Callable[[], Any], implementation: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = family()
        for value in model.parameters():
            value.data.normal_(std=0.2)
    loaded = Loaded(model.to(torch.bfloat16).eval(), Numbers())
    model.set_experts_implementation(implementation)
    items = ["3 4 5 6", "7 8", "9 10 11"]
    extras = Extras(batch_size=2, long_prompts=0, max_new_tokens=5)
    for policy in ("on-demand", LOSSY["uniform"], LOSSY["skip"], LOSSY["degraded"]):
        sim, real = (
            evaluate(loaded, setting(policy, 50), items, extras, machine=disk)
            for disk in (None, OnDisk())
        )

        assert real.outputs == sim.outputs
        assert real.failure is None


def test_a_model_is_asked_for_by_its_config(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    from moetier.experiments.config import check_run
    from moetier.experiments.live_runs import run_live

    data = {
        "live": "moe-tiny",
        "hardware": "rtx-4090",
        "capacity": {"hbm": "25 %"},
        "evaluate": {"items": 2, "long_prompts": 0},
        "machine": {"kind": "disk", "pace": "1 GB/s", "lanes": 2, "folder": str(tmp_path)},
    }
    result, failure = run_live(check_run(data, "a test"))

    assert failure is None
    assert result["lossless"]
    assert "time is measured" in result["known_limitations"][0]
    assert result["config"]["machine"]["pace"] == "1 GB/s"
    simulated, _ = run_live(check_run(data | {"machine": {"kind": "simulated"}}, "a test"))
    assert simulated["accuracy"] == result["accuracy"]
    assert simulated["tpot_ms"] != result["tpot_ms"]
    for machine, said in (
        ({"kind": "disk", "latency": "1 ms"}, "a latency without a pace is kept by nothing"),
        ({"kind": "disk", "folder": str(tmp_path / "no")}, "is not a folder"),
    ):
        with pytest.raises(InputError, match=said):
            run_live(check_run(data | {"machine": machine}, "a test"))
    with pytest.raises(InputError, match="`machine` says what performs a live model's run"):
        check_run(
            {"synthetic": {"geometry": "mixtral-8x7b"}, "hardware": "rtx-4090", "machine": {}},
            "a test",
        )


def test_plans_reach_the_machine_only_once(tiny: Loaded, monkeypatch: Any) -> None:
    """The record of a batch is written when the model has computed it, not before."""
    order: list[str] = []
    end, decide = LiveMachine.end, RealDriver.decide

    def noted(name: str, really: Any) -> Any:
        def note(*given: Any) -> Any:
            order.append(name)
            return really(*given)

        return note

    monkeypatch.setattr(LiveMachine, "end", noted("end", end))
    monkeypatch.setattr(RealDriver, "decide", noted("decide", decide))
    seen = run(tiny, "on-demand", OnDisk(), items=held_out_items(1)[:1])

    assert order == ["decide", "end"] * (len(order) // 2)
    assert len(seen.rows["step"]) == len(seen.plans)
