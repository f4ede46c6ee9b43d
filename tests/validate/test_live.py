"""What a plan makes a model compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="a live model needs the extra 'models'")
pytest.importorskip("transformers", reason="a live model needs the extra 'models'")

from moetier.sim.layout import Layout  # needs torch
from moetier.sim.memory import Extent
from moetier.sim.plan import LayerPlan
from moetier.sim.policy.base import Routing
from moetier.sim.policy.seams import routing
from moetier.sim.run import Setting, set_up, simulate
from moetier.traces.batch import DECODE, LayerBatch
from moetier.traces.errors import InputError
from moetier.traces.geometry import load_geometry
from moetier.traces.io import ArrayTrace
from moetier.traces.synthetic import Synthetic
from moetier.validate.live import Driver, chosen

LAYOUT = Layout([[10], [10]], 4)


def batch(weights: Any = (0.6, 0.4, 0.7, 0.3), tokens: Any = None) -> LayerBatch:
    """Return two tokens of layer 1: the first on experts 0 and 1, the second on 1 and 2."""
    values = None if weights is None else np.array(weights, np.float32)
    return LayerBatch(3, DECODE, 1, 2, 9, [0, 1, 1, 2], values, tokens)


def plan(given: LayerBatch, skip: list[int]) -> LayerPlan:
    made = LayerPlan(given, [4, 5, 6], skip)
    made.skip = skip
    return made


def test_a_skipped_expert_has_no_weight_for_any_token() -> None:
    choice = chosen(plan(batch(), [5]), LAYOUT, renormalise=False)

    assert choice.tokens == [0, 0, 1, 1]
    assert choice.experts == [0, 1, 1, 2]
    assert choice.weights.tolist() == pytest.approx([0.6, 0, 0, 0.3])
    assert choice.weights.dtype == np.float32


def test_what_is_left_is_scaled_up_token_by_token() -> None:
    choice = chosen(plan(batch((0.6, 0.4, 0.7, 0.1)), [5]), LAYOUT, renormalise=True)

    assert choice.weights.tolist() == pytest.approx([1, 0, 0, 0.8])


def test_a_token_that_is_left_nothing_gets_nothing() -> None:
    choice = chosen(plan(batch(), [4, 5]), LAYOUT, renormalise=True)

    assert choice.weights.tolist() == pytest.approx([0, 0, 0, 1])


def test_tokens_of_different_widths_are_kept_apart() -> None:
    choice = chosen(plan(batch(tokens=[0, 1, 1, 1]), [6]), LAYOUT, renormalise=True)

    assert choice.tokens == [0, 1, 1, 1]
    assert choice.weights.tolist() == pytest.approx([0.6, 0.4 * 1.4 / 1.1, 0.7 * 1.4 / 1.1, 0])


def test_routed_elsewhere_is_computed_elsewhere() -> None:
    made = LayerPlan(batch(), [4, 5, 6], [])
    choice = chosen(made, LAYOUT, renormalise=False)

    assert choice.experts is made.batch.experts
    assert choice.weights is made.batch.weights


def test_routing_without_weights_is_refused() -> None:
    with pytest.raises(InputError, match="layer 1 came back without weights"):
        chosen(plan(batch(None), []), LAYOUT, renormalise=False)


@pytest.fixture
def source() -> ArrayTrace:
    geometry = load_geometry("moe-tiny").model_copy(update={"n_experts": 8, "top_k": 2})
    return ArrayTrace.of(Synthetic(geometry, prompt=3, tokens=4, skew=1.0, seed=3))


def driver_of(source: ArrayTrace, setting: Setting) -> Driver:
    extent = Extent(context=7, steps=5, prefill_tokens=3, decode_tokens=4)
    return Driver(set_up(source.header, setting, extent, has_future=False), setting)


class Identity(Routing):
    """Returns a batch that is equal to what it was given."""

    def route(self, batch: LayerBatch) -> LayerBatch:
        """Weigh every expert with 1."""
        return LayerBatch(
            batch.step, batch.phase, batch.layer, batch.n_tokens, batch.context,
            list(batch.experts), np.ones(len(batch.experts), np.float32),
        )  # fmt: skip


@pytest.fixture
def big(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a setting maker for a machine with room for a real model."""
    from fractions import Fraction

    from moetier.sim.hardware import load_profile

    def make(policy: Any) -> Setting:
        return Setting(load_profile("phone-ufs4"), policy, {"dram": Fraction(1, 2)})

    return make


def test_batches_pushed_one_by_one_are_a_simulation(source: ArrayTrace, big: Any) -> None:
    driver = driver_of(source, big("on-demand"))
    choices = [driver.decide(each) for each in source.batches()]
    driver.finish()
    expected = simulate(source, big("on-demand"))

    assert choices == [None] * len(choices)
    assert driver.metrics.summary() == {
        name: expected.metrics[name] for name in driver.metrics.summary()
    }
    assert driver.elapsed_ns == expected.elapsed_ns


def test_after_the_record_caches_and_time_move_on_unheard(source: ArrayTrace, big: Any) -> None:
    plans: list[LayerPlan] = []
    spans: list[Any] = []
    setting = big("on-demand")
    extent = Extent(context=7, steps=5, prefill_tokens=3, decode_tokens=4)
    stage = set_up(source.header, setting, extent, has_future=False)
    driver = Driver(stage, setting, on_plan=plans.append, on_span=spans.append)
    batches = list(source.batches())
    for each in batches:
        driver.decide(each)
    driver.finish()
    recorded = driver.metrics.summary(), driver.elapsed_ns, len(plans), len(spans)
    for each in batches:
        driver.decide(each)

    assert (driver.metrics.summary(), driver.elapsed_ns, len(plans), len(spans)) == recorded
    assert recorded[2] == len(batches)
    assert recorded[3] > 0
    assert driver.machine.finish() > driver.elapsed_ns


def test_another_batch_object_is_computed_as_it_says(
    source: ArrayTrace, big: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    routing.names()
    monkeypatch.setitem(routing._entries, "identity", Identity)
    driver = driver_of(source, big({"routing": "identity"}))
    first = next(iter(source.batches()))
    choice = driver.decide(first)

    assert choice is not None
    assert choice.experts == first.experts
    assert choice.weights.tolist() == [1.0] * len(first.experts)


def test_an_oracle_never_gets_a_driver(source: ArrayTrace, big: Any) -> None:
    with pytest.raises(InputError, match="is an oracle"):
        driver_of(source, big("oracle-prefetch"))
