"""Evaluating a policy inside moe-tiny: figures, accuracy, and what lossless means."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="a live model needs the extra 'models'")
transformers = pytest.importorskip("transformers", reason="a live model needs the extra 'models'")

from moetier.sim.hardware import load_profile  # noqa: E402  # needs torch
from moetier.sim.policy.base import Prefetch, Routing  # noqa: E402
from moetier.sim.policy.seams import routing  # noqa: E402
from moetier.sim.run import Setting, simulate  # noqa: E402
from moetier.traces.batch import DECODE, LayerBatch  # noqa: E402
from moetier.traces.capture.load import load_model  # noqa: E402
from moetier.traces.errors import InputError  # noqa: E402
from moetier.traces.geometry import load_geometry  # noqa: E402
from moetier.traces.predictors import create  # noqa: E402
from moetier.traces.samples import moe_tiny_path  # noqa: E402
from moetier.traces.samples.tasks import held_out_items  # noqa: E402
from moetier.traces.synthetic import Synthetic  # noqa: E402
from moetier.validate import evaluate_plain  # noqa: E402
from moetier.validate.accuracy import answer_nll, exact_match  # noqa: E402
from moetier.validate.evaluate import Evaluation, Loaded, evaluate, one_thread  # noqa: E402
from moetier.validate.evaluate_arms import Extras, Found, first_difference  # noqa: E402
from moetier.validate.evaluate_questions import Question, tiny_questions  # noqa: E402
from moetier.validate.live_generate import Output  # noqa: E402

SHORT = Extras(long_prompts=0)
PHONE = load_profile("phone-ufs4")


@pytest.fixture(scope="module")
def tiny() -> Loaded:
    return Loaded(*load_model(str(moe_tiny_path())))


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """Runs of the plain model are not kept from one test to the next."""
    evaluate_plain._memory.clear()
    yield
    evaluate_plain._memory.clear()


def setting(policy: Any = "on-demand", share: Fraction = Fraction(1, 4), **more: Any) -> Setting:
    return Setting(PHONE, policy, {"dram": share}, **more)


def run(tiny: Loaded, policy: Any, n: int = 6, extras: Extras = SHORT, **more: Any) -> Evaluation:
    return evaluate(tiny, setting(policy), tiny_questions(n), extras, **more)


@pytest.mark.slow
def test_on_demand_is_lossless_and_as_accurate_as_the_model(tiny: Loaded) -> None:
    found = run(tiny, "on-demand", 22)
    items = held_out_items(2)

    metrics = found.metrics
    assert found.failure is None
    assert metrics["lossless"] is True
    assert metrics["items"] == 22
    assert metrics["accuracy"] == exact_match(*tiny, items).overall.mean
    assert metrics["nll"] == pytest.approx(np.mean(answer_nll(*tiny, items)), rel=1e-3, abs=1e-6)
    assert metrics["nll_difference"] == {"mean": 0, "low": 0, "high": 0, "n": 22}
    assert metrics["accuracy_difference"] == {"mean": 0, "low": 0, "high": 0, "n": 22}
    assert metrics["plain"]["nll"] == metrics["nll"]
    assert {row["n"] for row in metrics["accuracy_by_task"].values()} == {2}
    assert metrics["repetition_share"] is None


def test_an_evaluation_has_every_figure_of_a_simulation(tiny: Loaded) -> None:
    found = run(tiny, "on-demand", 2)
    synthetic = Synthetic(load_geometry("moe-tiny"), prompt=4, tokens=3)

    assert set(simulate(synthetic, setting()).metrics) <= set(found.metrics)
    assert found.metrics["tokens"] == sum(len(o.tokens) - 1 for o in found.outputs)
    assert found.metrics["tpot_ms"] > 0


@pytest.mark.slow
def test_skipping_loses_accuracy_and_says_so(tiny: Loaded) -> None:
    found = run(tiny, {"miss": "skip"}, 33)

    metrics = found.metrics
    assert found.failure is None  # it never claimed to be lossless
    assert metrics["lossless"] is False
    assert metrics["skipped_share"] > 0.5
    assert metrics["accuracy"] < metrics["plain"]["accuracy"]
    assert metrics["nll_difference"]["mean"] > 0
    assert metrics["nll_difference"]["low"] <= metrics["nll_difference"]["mean"]
    assert metrics["accuracy_difference"]["n"] == 33
    assert not any(text.startswith("replayed lossy") for text in found.known_limitations)


@pytest.mark.slow
def test_scaling_up_what_is_left_changes_what_is_computed(tiny: Loaded) -> None:
    plain = run(tiny, {"miss": {"kind": "skip", "keep": 1}}, 6)
    scaled = run(tiny, {"miss": {"kind": "skip", "keep": 1, "renormalise": True}}, 6)

    assert plain.outputs != scaled.outputs


@pytest.mark.slow
def test_a_lossy_policy_that_lost_nothing_is_measured_lossless(tiny: Loaded) -> None:
    policy = {"miss": "skip", "warmup": "static", "eviction": "static"}
    found = evaluate(tiny, setting(policy, Fraction(1)), tiny_questions(4), SHORT)

    assert found.metrics["skipped_share"] == 0
    assert found.metrics["lossless"] is True
    assert "policy inert: nothing was ever skipped or done without" in found.warnings


class SwapOne(Routing):
    """Claims to change nothing, and swaps one id of one batch."""

    def route(self, batch: LayerBatch) -> LayerBatch:
        """Give the first entry an expert that nobody chose."""
        if batch.phase != DECODE or batch.layer != 5 or batch.step != 1:
            return batch
        experts = list(batch.experts)
        experts[0] = next(e for e in range(32) if e not in experts)
        return LayerBatch(
            batch.step, batch.phase, batch.layer, batch.n_tokens, batch.context, experts,
            batch.weights,
        )  # fmt: skip


@pytest.mark.slow
def test_one_swapped_id_is_found_out(tiny: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    routing.names()  # loads what is registered
    monkeypatch.setitem(routing._entries, "swap-one", SwapOne)
    found = run(tiny, {"routing": "swap-one"}, 3)

    assert found.metrics["lossless"] is False
    assert found.failure is not None
    assert "says it is lossless, but the logits of item 1 are not bit for bit" in found.failure


@pytest.mark.slow
def test_a_difference_to_a_run_kept_from_before_is_checked_again(tiny: Loaded) -> None:
    """What was kept may come from another machine: it alone convicts nobody."""
    run(tiny, "on-demand", 2)
    for outputs in evaluate_plain._memory.values():
        outputs[:] = [type(o)(o.tokens, o.nll, "other") for o in outputs]

    found = run(tiny, "on-demand", 2)

    assert found.metrics["lossless"] is True
    assert found.failure is None


@pytest.mark.slow
def test_the_same_run_twice_is_the_same(tiny: Loaded) -> None:
    blocks: list[list[bytes]] = []
    for _ in range(2):
        rows: list[bytes] = []
        found = run(
            tiny, {"miss": "skip"}, 4,
            sinks=[lambda c, rows=rows: rows.extend(c[name].tobytes() for name in sorted(c))],
        )  # fmt: skip
        blocks.append([*rows, repr(found.metrics).encode()])

    assert blocks[0] == blocks[1]


@pytest.mark.slow
def test_long_texts_are_judged_for_loops(tiny: Loaded) -> None:
    extras = Extras(long_prompts=2, long_tokens=48, batch_size=2)
    found = run(tiny, "on-demand", 2, extras)

    assert [len(o.tokens) for o in found.long_outputs] == [48, 48]
    assert found.metrics["repetition_share"] in (0, 0.5, 1)
    assert found.metrics["plain"]["repetition_share"] == found.metrics["repetition_share"]
    assert found.metrics["lossless"] is True
    assert "2 requests run in lockstep, padded on the left" in found.known_limitations


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 4])
def test_batches_are_lossless_too(tiny: Loaded, size: int) -> None:
    found = run(tiny, "previous-token", 6, Extras(batch_size=size, long_prompts=0))

    assert found.metrics["lossless"] is True
    assert found.metrics["accuracy"] == 1


def test_prompts_without_answers_have_no_accuracy(tiny: Loaded) -> None:
    found = evaluate(
        tiny, setting(), ["add 1,2=", "copy ab="], Extras(long_prompts=0, max_new_tokens=2)
    )

    metrics = found.metrics
    assert [len(o.tokens) for o in found.outputs] == [2, 2]
    for name in ("accuracy", "accuracy_se", "accuracy_by_task", "accuracy_difference",
                 "nll", "nll_se", "nll_difference"):  # fmt: skip
        assert metrics[name] is None, name
    assert metrics["lossless"] is True


def test_a_wrong_answer_is_scored_along_the_true_one(tiny: Loaded) -> None:
    questions = [Question("copy abc=", "abd\n", "copy"), Question("copy abc=", "abc\n", "copy")]
    found = evaluate(tiny, setting(), questions, SHORT)

    assert found.metrics["accuracy"] == 0.5
    assert found.metrics["nll"] > 1
    assert found.metrics["nll_difference"]["mean"] == 0
    assert found.metrics["accuracy_by_task"]["copy"]["n"] == 2


@pytest.mark.slow
def test_a_predictor_beside_the_model_serves_a_lossless_policy(tiny: Loaded) -> None:
    found = run(tiny, {"prefetch": "predicted"}, 6, predictor="router-reuse")

    assert found.metrics["lossless"] is True
    assert found.metrics["prefetch_issued"] > 0
    assert found.metrics["prefetch_precision"] > 0.5
    assert found.header.predictors[0].name == "router-reuse"


@pytest.mark.slow
def test_speculation_runs_what_was_predicted(tiny: Loaded) -> None:
    policy = {"preset": "speculating-experts", "prefetch": "predicted"}
    found = run(tiny, policy, 6, predictor=create({"kind": "router-reuse", "horizons": [1]}))

    assert found.metrics["lossless"] is False
    assert found.failure is None
    assert found.metrics["nll_difference"]["mean"] != 0


def test_a_policy_that_reads_predictions_needs_a_predictor(tiny: Loaded) -> None:
    problem = "predictor: policy 'speculating-experts' reads predictions of 'default-vector', and"
    with pytest.raises(InputError, match=problem):
        run(tiny, "speculating-experts")


def test_an_oracle_is_refused(tiny: Loaded) -> None:
    with pytest.raises(InputError, match=r"'belady' is an oracle: .* a live model does not have"):
        run(tiny, "belady")


def test_a_precision_that_cannot_be_computed_is_refused(tiny: Loaded) -> None:
    with pytest.raises(InputError, match=r"policy.precision: experts of 12 bits cannot be"):
        run(tiny, {"precision": {"kind": "uniform", "bits": 12}})


@pytest.mark.slow
def test_fewer_bits_are_what_the_model_computes_with(tiny: Loaded) -> None:
    policies = [{"precision": {"kind": "uniform", "bits": bits}} for bits in (8, 3, 1)]
    eight, three, one = (run(tiny, policy, 22) for policy in policies)
    plain = run(tiny, "on-demand", 22)

    lost = [found.metrics["nll_difference"]["mean"] for found in (eight, three, one)]
    assert [abs(lost[0]) < 0.01, lost[0] < lost[1] < lost[2]] == [True, True]
    assert one.metrics["accuracy"] < 0.6
    assert [found.metrics["lossless"] for found in (eight, three, one)] == [False] * 3
    assert plain.metrics["lossless"] is True  # the weights are back


@pytest.mark.parametrize("extras", [Extras(batch_size=0), Extras(long_prompts=-1)])
def test_impossible_batches_are_refused(tiny: Loaded, extras: Extras) -> None:
    with pytest.raises(InputError, match="give at least one item and batches of at least one"):
        run(tiny, "on-demand", extras=extras)


@pytest.mark.parametrize(
    ("prompt", "extras"),
    [("7" * 2000, Extras(long_prompts=0)), ("7", Extras(long_prompts=1, long_tokens=1024))],
    ids=["prompt", "long-text"],
)
def test_what_goes_beyond_the_models_positions_is_refused(
    prompt: str, extras: Extras, tiny: Loaded
) -> None:
    with pytest.raises(InputError, match=r"evaluate: .* beyond the 1024 positions of the model"):
        evaluate(tiny, setting(), [prompt], extras)


def test_no_items_are_refused(tiny: Loaded) -> None:
    with pytest.raises(InputError, match="0 items"):
        evaluate(tiny, setting(), [], SHORT)


@pytest.mark.slow
def test_the_model_is_left_as_it_was(tiny: Loaded) -> None:
    model = tiny.model
    model.train()
    config, threads = model.generation_config, torch.get_num_threads()
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    with pytest.raises(InputError):
        run(tiny, "belady")
    run(tiny, "on-demand", 1)

    assert model.training
    assert model.generation_config is config
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    model.eval()


@pytest.mark.slow
def test_progress_counts_to_the_end(tiny: Loaded, tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    for _ in range(2):  # the second time the plain run is there already
        heard.clear()
        run(tiny, "on-demand", 2, progress=lambda *x: heard.append(x), plain_folder=tmp_path)

        assert heard[-1] == (4, 4)
        assert heard == sorted(heard)
        evaluate_plain._memory.clear()
    assert len(list(tmp_path.iterdir())) == 1


def test_other_weights_than_the_models_are_said(tiny: Loaded) -> None:
    found = evaluate(tiny, setting(weights="q4_0"), tiny_questions(1), SHORT)

    assert any("bytes are those of q4_0" in text for text in found.known_limitations)


def test_a_checkpoint_of_another_type_has_to_say_its_bytes() -> None:
    config = transformers.OlmoeConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, intermediate_size=16,
        num_experts=8, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    loaded = Loaded(transformers.OlmoeForCausalLM(config).double().eval(), Numbers())
    loaded.model.set_experts_implementation("eager")  # the others compute no float64
    extras = Extras(long_prompts=0, max_new_tokens=2)

    with pytest.raises(InputError, match=r"weights: the checkpoint is stored in float64, .* bf16"):
        evaluate(loaded, setting(), ["3 4"], extras)
    loaded.model.float()
    assert evaluate(loaded, setting(), ["3 4"], extras).metrics["lossless"] is True
    for experts in ("eager", "batched_mm", "grouped_mm"):
        loaded.model.set_experts_implementation(experts)
        found = evaluate(loaded, setting(weights="bf16"), ["3 4"], extras)
        assert found.metrics["lossless"] is True, experts


class Numbers:
    """A tokenizer of texts that are numbers."""

    pad_token_id = 0

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """Return the ids in *text*."""
        return {"input_ids": [int(word) for word in text.split()]}


def test_a_small_model_computes_on_one_thread(tiny: Loaded) -> None:
    kept = torch.get_num_threads()
    torch.set_num_threads(2)
    with one_thread(tiny.model):
        inside = torch.get_num_threads()
    after = torch.get_num_threads()
    torch.set_num_threads(kept)

    assert (inside, after) == (1, 2)


def test_scores_are_taken_only_for_who_reads_them() -> None:
    from moetier.sim.policy.compose import compose
    from moetier.validate.evaluate import _reads_scores

    assert not _reads_scores(compose("on-demand"))
    assert _reads_scores(compose("previous-token"))
    assert _reads_scores(compose({"miss": "skip"}))
    assert Prefetch.candidates(Prefetch(), LayerBatch(0, 0, 0, 1, 1, [0]), []) == ()


def test_a_checkpoint_may_be_a_path() -> None:
    found = evaluate(moe_tiny_path(), setting(), ["add 1,2="], Extras(long_prompts=0))

    assert found.metrics["lossless"] is True
    assert math.isfinite(found.elapsed_ns)


def test_the_first_difference_is_named() -> None:
    def arm(*outputs: Output, long: tuple[Output, ...] = ()) -> Found:
        return Found(list(outputs), list(long), [])

    a, b = Output((1, 2), (), "x"), Output((1, 3), (), "x")
    c, d = Output((1, 2, 3), (), "x"), Output((1, 2), (), "y")

    assert first_difference(arm(a), arm(a)) is None
    assert first_difference(arm(a, a), arm(a, b)) == "token 2 of item 2 is not the plain model's"
    assert first_difference(arm(a), arm(c)) == "token 3 of item 1 is not the plain model's"
    assert (
        first_difference(arm(a, long=(a,)), arm(a, long=(d,)))
        == "the logits of long text 1 are not bit for bit the plain model's"
    )


def test_items_of_the_tasks_may_be_given_as_they_are(tiny: Loaded) -> None:
    found = evaluate(tiny, setting(), held_out_items(1)[:1], SHORT)

    assert found.metrics["accuracy"] == 1
    assert set(found.metrics["accuracy_by_task"]) == {"add"}
