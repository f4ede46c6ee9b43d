"""A policy that never asks about lateness decides the same on a trace and inside the model."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="a live model needs the extra 'models'")
transformers = pytest.importorskip("transformers", reason="a live model needs the extra 'models'")

from moetier.sim.hardware import load_profile  # noqa: E402  # needs torch
from moetier.sim.plan import LayerPlan  # noqa: E402
from moetier.sim.run import Setting, simulate  # noqa: E402
from moetier.traces.capture.load import load_model  # noqa: E402
from moetier.traces.capture.run import capture  # noqa: E402
from moetier.traces.io import TraceReader  # noqa: E402
from moetier.traces.predictors import create  # noqa: E402
from moetier.traces.samples import moe_tiny_path  # noqa: E402
from moetier.traces.samples.tasks import held_out_items  # noqa: E402
from moetier.validate.evaluate import Loaded, evaluate  # noqa: E402
from moetier.validate.evaluate_arms import Extras  # noqa: E402

POLICIES: list[Any] = [
    "on-demand",
    {"eviction": "lfu"},
    {"eviction": "random"},
    {"eviction": "layer-lfu", "warmup": "last-layer"},
    "previous-token",
    {"preset": "previous-token", "eviction": "fifo"},
    "on-demand-uncached",
    "fiddler",
    {"prefetch": {"kind": "predicted", "predictor": "router-reuse"}},
]
TOKENS = 6


class Numbers:
    """A tokenizer of texts that are numbers."""

    pad_token_id = 0

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """Return the ids in *text*."""
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids: list[int]) -> str:
        """Return *ids* as text."""
        return " ".join(map(str, ids))


def tiny() -> tuple[Loaded, list[str]]:
    items = held_out_items(1)
    return Loaded(*load_model(str(moe_tiny_path()))), [item.prompt for item in items[:7]]


def olmoe() -> tuple[Loaded, list[str]]:
    config = transformers.OlmoeConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, intermediate_size=16,
        num_experts=8, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.OlmoeForCausalLM(config)
        for value in model.parameters():
            value.data.normal_(std=0.2)
    model = model.to(torch.bfloat16)  # stored as fp32, experts have no format
    return Loaded(model.eval(), Numbers()), ["3 4 5 6", "7 8", "9 10 11", "12 13 14 15 16"]


CASES = {"moe-tiny": tiny, "olmoe": olmoe}


@pytest.fixture(scope="module", params=[("moe-tiny", 1), ("moe-tiny", 3), ("olmoe", 2)], ids=str)
def case(request: Any, tmp_path_factory: Any) -> tuple[Loaded, list[str], int, Path]:
    """A model, its prompts, a batch size, and what was captured of them."""
    name, size = request.param
    loaded, prompts = CASES[name]()
    path = tmp_path_factory.mktemp("trace") / "t.parquet"
    kept = torch.get_num_threads()
    torch.set_num_threads(1)
    capture(
        loaded.model, loaded.tokenizer, prompts, path,
        max_new_tokens=TOKENS, batch_size=size, predictor=create("router-reuse"),
    )  # fmt: skip
    torch.set_num_threads(kept)
    return loaded, prompts, size, path


def entry(plan: LayerPlan) -> dict[str, Any]:
    """Return everything that was decided."""
    batch = plan.batch
    names = ("needed", "missing", "fetch", "cpu", "skip", "prefetch", "evicted", "replaced")
    return {
        "at": (batch.step, batch.phase, batch.layer, batch.n_tokens, batch.context),
        **{name: list(getattr(plan, name)) for name in names},
    }


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_decision_log_and_all_figures_are_the_same(
    policy: Any, case: tuple[Loaded, list[str], int, Path]
) -> None:
    loaded, prompts, size, path = case
    setting = Setting(load_profile("rtx-a6000"), policy, {"hbm": Fraction(2, 5)})
    recorded: list[dict[str, Any]] = []
    live: list[dict[str, Any]] = []

    trace = simulate(
        TraceReader(path, with_scores=True), setting, on_plan=lambda p: recorded.append(entry(p))
    )
    extras = Extras(batch_size=size, long_prompts=0, max_new_tokens=TOKENS)
    predictor = "router-reuse" if "router-reuse" in str(policy) else None
    model = evaluate(
        loaded, setting, prompts, extras, predictor=predictor,
        on_plan=lambda p: live.append(entry(p)),
    )  # fmt: skip

    assert live == recorded
    assert model.failure is None
    assert model.metrics["lossless"] is True
    assert {name: model.metrics[name] for name in trace.metrics} == trace.metrics
    assert model.elapsed_ns == trace.elapsed_ns
    assert model.stage.capacities == trace.stage.capacities
