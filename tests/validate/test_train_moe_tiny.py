"""Check the training of moe-tiny: its data, its losses, and that a stopped run continues."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from moetier.traces.samples.tasks import ALPHABET, END, TASKS, Item, held_out_items, split_of
from moetier.validate.train_moe_tiny import (
    LONG_EVERY,
    LONG_ROWS,
    PEAK_RATE,
    PROMPT_WEIGHT,
    SHORT_ROWS,
    WARM_UP_STEPS,
    Plan,
    balance_loss,
    batch,
    main,
    rate,
    tiny_config,
    tiny_tokenizer,
    train,
)

EQUAL = dict.fromkeys(TASKS, 1.0)


@pytest.mark.parametrize("item", held_out_items(1), ids=lambda item: item.task)
def test_one_token_is_one_character(item: Item) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(item.text)

    assert len(ids) == len(item.text)
    assert tokenizer.decode(ids) == item.text


def test_the_vocabulary_fits_the_model() -> None:
    tokenizer = tiny_tokenizer()

    assert len(tokenizer) == len(ALPHABET) + 1
    assert len(tokenizer) <= tiny_config().vocab_size
    assert tokenizer.eos_token_id == tiny_config().eos_token_id
    assert tokenizer.pad_token_id == tiny_config().pad_token_id


@pytest.mark.parametrize("step", [0, 1])
def test_batches_have_the_planned_shape(step: int) -> None:
    ids, weights = batch(0, step, EQUAL)
    expected = LONG_ROWS if step % LONG_EVERY == 0 else SHORT_ROWS

    assert tuple(ids.shape) == expected
    assert tuple(weights.shape) == expected


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    again = batch(3, 1, EQUAL)

    assert all(map(torch.equal, batch(3, 1, EQUAL), again))
    assert not torch.equal(batch(3, 2, EQUAL)[0], again[0])
    assert not torch.equal(batch(4, 1, EQUAL)[0], again[0])


def test_rows_hold_whole_training_items_and_weigh_their_answers() -> None:
    ids, weights = batch(0, 1, EQUAL)
    text = str(tiny_tokenizer().decode(ids[0].tolist()))
    items = text.split(END)[:-1]  # the last one may be cut
    expected: list[float] = []
    for item in items:
        prompt, answer = item.split("=")
        finite = TASKS[prompt.split(" ")[0]].finite
        assert finite or split_of(prompt + "=") == "train"
        expected += [PROMPT_WEIGHT] * (len(prompt) + 1) + [1.0] * (len(answer) + 1)

    assert weights[0, : len(expected)].tolist() == pytest.approx(expected)


def test_balanced_routing_has_balance_one() -> None:
    """Token t prefers experts t and t + 1 of 4: each is used twice, probabilities are even."""
    logits = torch.full((4, 4), -10.0)
    for token in range(4):
        logits[token, [token, (token + 1) % 4]] = 10.0

    assert float(balance_loss([logits, logits], top_k=2)) == pytest.approx(1.0)


def test_routing_to_the_same_experts_has_balance_experts_over_top_k() -> None:
    logits = torch.full((6, 8), -50.0)
    logits[:, :2] = 50.0

    assert float(balance_loss([logits], top_k=2)) == pytest.approx(8 / 2)


def test_the_learning_rate_rises_stays_and_falls() -> None:
    steps = 10_000

    assert rate(0, steps) == pytest.approx(PEAK_RATE / WARM_UP_STEPS)
    assert rate(WARM_UP_STEPS, steps) == PEAK_RATE
    assert rate(steps // 2, steps) == PEAK_RATE
    assert rate(steps - 1, steps) == pytest.approx(PEAK_RATE / 4500)


@pytest.mark.slow
def test_a_stopped_run_continues_as_if_it_had_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(name: str) -> Plan:
        return Plan(4, 0, tmp_path / "out", tmp_path / name, check_every=2)

    def stop_at_step_3(seed: int, step: int, shares: Mapping[str, float]) -> tuple[Tensor, Tensor]:
        if step == 3:
            raise KeyboardInterrupt
        return batch(seed, step, shares)

    straight = train(plan("straight.pt")).state_dict()
    with monkeypatch.context() as patch:
        patch.setattr("moetier.validate.train_moe_tiny.batch", stop_at_step_3)
        with pytest.raises(KeyboardInterrupt):
            train(plan("stopped.pt"))
    resumed = train(plan("stopped.pt")).state_dict()

    assert resumed.keys() == straight.keys()
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)


@pytest.mark.slow
def test_the_command_saves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    out, state = tmp_path / "out", tmp_path / "state.pt"
    status = main(["--out", str(out), "--steps", "1", "--state", str(state)])
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out)

    assert status == 0
    assert model.config.num_experts_per_tok == 4
    assert tokenizer.encode("add") == tiny_tokenizer().encode("add")

    with pytest.raises(ValueError, match="was trained with seed 0, not 1; remove it"):
        main(["--out", str(out), "--steps", "1", "--seed", "1", "--state", str(state)])
