"""Cache-aware routing and mixed precision inside moe-tiny: what they cost, and when nothing."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="a live model needs the extra 'models'")
pytest.importorskip("transformers", reason="a live model needs the extra 'models'")

from moetier.sim.hardware import load_profile  # noqa: E402  # needs torch
from moetier.sim.plan import LayerPlan  # noqa: E402
from moetier.sim.run import Setting, simulate  # noqa: E402
from moetier.traces.batch import DECODE  # noqa: E402
from moetier.traces.capture.load import load_model  # noqa: E402
from moetier.traces.capture.run import capture  # noqa: E402
from moetier.traces.io import TraceReader  # noqa: E402
from moetier.traces.samples import moe_tiny_path  # noqa: E402
from moetier.traces.samples.tasks import held_out_items  # noqa: E402
from moetier.validate.evaluate import Evaluation, Loaded, evaluate  # noqa: E402
from moetier.validate.evaluate_arms import Extras  # noqa: E402
from moetier.validate.evaluate_questions import tiny_questions  # noqa: E402

PHONE = load_profile("phone-ufs4")
OFF: list[dict[str, Any]] = [
    {"routing": {"kind": "cache-prior", "strength": 0}},
    {"routing": {"kind": "cache-prior", "strength": 1, "top": 32}},
    {"routing": {"kind": "cumsum", "mass": 0}},
    {"routing": {"kind": "cumsum", "mass": 1e-9}},
    {"precision": {"kind": "hobbit", "t1": 1, "t2": 1}},
]


@pytest.fixture(scope="module")
def tiny() -> Loaded:
    return Loaded(*load_model(str(moe_tiny_path())))


def setting(policy: Any, share: Fraction = Fraction(1, 8)) -> Setting:
    return Setting(PHONE, policy, {"dram": share})


def run(tiny: Loaded, policy: Any, n: int = 6, **more: Any) -> Evaluation:
    return evaluate(tiny, setting(policy), tiny_questions(n), Extras(long_prompts=0), **more)


@pytest.mark.slow
@pytest.mark.parametrize("policy", OFF, ids=str)
def test_without_effect_no_bit_changes(tiny: Loaded, policy: dict[str, Any]) -> None:
    found, plain = run(tiny, policy), run(tiny, "on-demand")

    assert found.metrics["lossless"] is True
    assert found.failure is None
    assert found.metrics["miss_rate"] == plain.metrics["miss_rate"]


@pytest.mark.slow
def test_a_strong_prior_saves_misses_and_costs_answers(tiny: Loaded) -> None:
    strengths = (0, 0.2, 0.5, 1)
    runs = [
        run(tiny, {"routing": {"kind": "cache-prior", "strength": s, "top": 0}}, 33).metrics
        for s in strengths
    ]
    rates = [metrics["miss_rate"] for metrics in runs]
    lost = [metrics["nll_difference"]["mean"] for metrics in runs]

    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.6 * rates[0]
    assert [metrics["lossless"] for metrics in runs] == [True, False, False, False]
    assert lost[0] == 0
    assert lost[-1] == max(lost)
    assert lost[-1] > 0.01


@pytest.mark.slow
def test_the_top_experts_keep_the_answers(tiny: Loaded) -> None:
    bare, kept = (
        run(tiny, {"routing": {"kind": "cache-prior", "strength": 1, "top": j}}, 33).metrics
        for j in (0, 2)
    )

    assert kept["nll_difference"]["mean"] < bare["nll_difference"]["mean"]
    assert kept["miss_rate"] > bare["miss_rate"]


@pytest.mark.slow
def test_a_larger_mass_saves_more_misses(tiny: Loaded) -> None:
    rates = [
        run(tiny, {"routing": {"kind": "cumsum", "mass": mass}}).metrics["miss_rate"]
        for mass in (0.1, 0.5, 0.9)
    ]

    assert rates == sorted(set(rates), reverse=True)


@pytest.mark.slow
def test_what_is_computed_is_what_was_planned(tiny: Loaded) -> None:
    """Experts that nobody chose are run, weighed to the sum the model's own weights had."""
    plans: list[LayerPlan] = []
    run(tiny, {"routing": {"kind": "cache-prior", "strength": 1}}, 2, on_plan=plans.append)
    moved = 0
    for plan in plans:
        batch = plan.batch
        if batch.phase != DECODE:
            continue
        assert batch.scores is not None
        assert batch.weights is not None
        moved += set(batch.experts) != set(np.argsort(-batch.scores[0])[: len(batch.experts)])
        assert batch.weights.sum() == pytest.approx(1, abs=1e-5)

    assert moved > 10


@pytest.mark.slow
def test_fewer_bits_for_what_matters_less_cost_less_than_for_all(tiny: Loaded) -> None:
    two, low, skipping = (
        run(tiny, {"precision": precision}, 33).metrics
        for precision in (
            {"kind": "uniform", "bits": 2},
            {"kind": "hobbit", "low": 2},
            {"kind": "hobbit", "low": 2, "t1": 0, "t2": 0},
        )
    )

    lost = [metrics["nll_difference"]["mean"] for metrics in (low, skipping, two)]
    assert low["lossless"] is False
    assert abs(lost[0]) < 0.1 * lost[2]
    assert lost[1] > lost[0]  # only the first expert of a token is left
    assert skipping["decode_bytes_looked_up"] < low["decode_bytes_looked_up"]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("policy", [OFF[0], OFF[3], OFF[4]], ids=str)
def test_a_trace_and_the_model_decide_alike(
    tiny: Loaded, policy: dict[str, Any], size: int, tmp_path: Any
) -> None:
    prompts = [item.prompt for item in held_out_items(1)[:4]]
    path = tmp_path / "t.parquet"
    capture(*tiny, prompts, path, max_new_tokens=5, batch_size=size)
    logs: tuple[list[Any], list[Any]] = ([], [])

    def noting(log: list[Any]) -> Any:
        names = ("needed", "missing", "fetch", "evicted")
        return lambda plan: log.append([list(getattr(plan, name)) for name in names])

    trace = simulate(TraceReader(path, with_scores=True), setting(policy), on_plan=noting(logs[0]))
    extras = Extras(batch_size=size, long_prompts=0, max_new_tokens=5)
    live = evaluate(tiny, setting(policy), prompts, extras, on_plan=noting(logs[1]))

    assert logs[0] == logs[1]
    assert len(logs[0]) > 40
    same = set(trace.metrics) - {"accuracy", "lossless"}
    assert {name: live.metrics[name] for name in same} == {n: trace.metrics[n] for n in same}
    assert live.metrics["lossless"] is True
