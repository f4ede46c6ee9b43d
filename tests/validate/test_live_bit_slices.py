"""Bit slices inside moe-tiny: what is computed is what the slices hold, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="a live model needs the extra 'models'")
pytest.importorskip("transformers", reason="a live model needs the extra 'models'")

from torch import Tensor  # noqa: E402  # needs torch

from moetier.sim.hardware import load_profile  # noqa: E402
from moetier.sim.plan import LayerPlan  # noqa: E402
from moetier.sim.run import Setting  # noqa: E402
from moetier.traces.capture.find import MoeLayer, find_moe_layers  # noqa: E402
from moetier.traces.capture.load import load_model  # noqa: E402
from moetier.traces.samples import moe_tiny_path  # noqa: E402
from moetier.validate.evaluate import Evaluation, Loaded, evaluate  # noqa: E402
from moetier.validate.evaluate_arms import Extras  # noqa: E402
from moetier.validate.evaluate_questions import tiny_questions  # noqa: E402
from moetier.validate.numerics.experts import ExpertMatrices, rewritten  # noqa: E402
from moetier.validate.numerics.variants import high_bits, nested  # noqa: E402

BITS = (6, 3)
ALL, NONE = 0, 2  # thresholds under which every expert is critical, and no one
QUARTER = Fraction(1, 4)
FIVE = tuple(tiny_questions(5))

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny() -> Loaded:
    return Loaded(*load_model(str(moe_tiny_path())))


def sliced(theta: float, miss: Any = "fetch") -> dict[str, Any]:
    precision = {"kind": "bit-sliced", "bits": list(BITS), "theta": theta}
    return {"precision": precision, "eviction": "slice-aware", "miss": miss}


def run(tiny: Loaded, policy: Any, size: int = 1, items: Any = FIVE, **more: Any) -> Evaluation:
    setting = Setting(load_profile("phone-ufs4"), policy, {"dram": QUARTER})
    extras = Extras(batch_size=size, long_prompts=2, long_tokens=8)
    return evaluate(tiny, setting, items, extras, **more)


@contextmanager
def at(model: Any, variant: Any) -> Iterator[None]:
    """Let *model* have experts that a *variant* of quantising makes, by another way than ours."""

    def change(where: MoeLayer, stack: ExpertMatrices) -> dict[str, Tensor]:
        return {name: variant(w, *BITS, 32) for name, w in stack.matrices().items()}

    with rewritten(find_moe_layers(model), change):
        yield


def states(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def digests(found: Evaluation) -> list[tuple[Any, str]]:
    return [(output.tokens, output.digest) for output in (*found.outputs, *found.long_outputs)]


@pytest.mark.parametrize("size", [1, 3])
def test_all_critical_and_all_fetched_is_the_high_precision_bit_for_bit(
    tiny: Loaded, size: int
) -> None:
    whole = run(tiny, {"precision": {"kind": "uniform", "bits": BITS[0]}}, size)
    found = run(tiny, sliced(ALL), size)

    assert digests(found) == digests(whole)
    assert found.metrics["lossless"] is False
    with at(tiny.model, high_bits):
        assert digests(run(tiny, "on-demand", size)) == digests(found)


@pytest.mark.parametrize("size", [1, 3])
def test_none_critical_is_a_model_of_msb_slices_bit_for_bit(tiny: Loaded, size: int) -> None:
    """The requests of a batch are the same one, so that none is padded: see below."""
    plans: list[LayerPlan] = []
    items = FIVE[:1] * 3 if size > 1 else FIVE
    found = run(tiny, sliced(NONE), size, items, on_plan=plans.append)
    with at(tiny.model, nested):
        expected = run(tiny, "on-demand", size, items)

    assert digests(found) == digests(expected)
    assert all(not s & 1 for plan in plans for s in plan.needed)
    assert found.metrics["miss_rate_lsb"] is None


def test_padding_is_computed_at_high_precision_and_changes_no_more_than_rounding(
    tiny: Loaded,
) -> None:
    """No batch has padded tokens; what they add to a matrix product moves others' last bits."""
    found = run(tiny, sliced(NONE), 3)
    with at(tiny.model, nested):
        expected = run(tiny, "on-demand", 3)

    for ours, theirs in zip(found.outputs, expected.outputs, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.nll == pytest.approx(theirs.nll, rel=1e-4, abs=1e-6)


def test_doing_without_every_lsb_slice_in_decode_is_a_low_decode(tiny: Loaded) -> None:
    """From an empty cache, into which no LSB slice ever comes."""
    plans: list[LayerPlan] = []
    policy = sliced(ALL, "degrade") | {"warmup": "empty"}
    found = run(tiny, policy, on_plan=plans.append)
    decode = [plan for plan in plans if plan.batch.phase]

    assert all({s for s in plan.needed if s & 1} == set(plan.degrade) for plan in decode)
    assert all(not plan.degrade for plan in plans if not plan.batch.phase)
    assert digests(found) != digests(run(tiny, sliced(ALL)))
    assert found.metrics["degraded_share"] == 0.5


def test_the_model_is_as_it_was_and_keeps_no_trace(tiny: Loaded) -> None:
    before = states(tiny.model)
    plain = digests(run(tiny, "on-demand"))
    run(tiny, "slicemoe")

    assert all(torch.equal(value, before[name]) for name, value in tiny.model.state_dict().items())
    assert all("forward" not in where.experts.__dict__ for where in find_moe_layers(tiny.model))
    assert digests(run(tiny, "on-demand")) == plain


def test_what_is_lost_grows_as_fewer_experts_are_critical(tiny: Loaded) -> None:
    low = partial(run, tiny, items=tiny_questions(22))
    lost = [
        low({"precision": {"kind": "bit-sliced", "bits": [4, 1], "theta": theta}}).metrics[
            "nll_difference"
        ]["mean"]
        for theta in (ALL, 0.3, NONE)
    ]

    assert lost[0] < lost[1] < lost[2]
