"""This module trains moe-tiny and saves it as an ordinary checkpoint.

``python -m moetier.validate.train_moe_tiny --out build/moe-tiny`` runs on one CPU core. The state
is saved every few hundred steps and picked up by the next call, and data depend on the seed and
the step alone, so a stopped run continues as if it had not been stopped.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from torch.nn import functional
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moetier.traces import samples
from moetier.traces.samples.tasks import ALPHABET, END, TASKS, Item, held_out_items, training_items
from moetier.validate import fast_experts
from moetier.validate.accuracy import answer_scores, summarise
from moetier.validate.numerics.spread import OCTAVES, spread_channels

log = logging.getLogger(__name__)

PAD = "<pad>"
PAD_ID = 0
MAX_LENGTH = 1024
VOCABULARY = {PAD: PAD_ID} | {letter: i for i, letter in enumerate(ALPHABET, start=1)}

PEAK_RATE = 1.5e-3
WARM_UP_STEPS = 200
DECAY_FROM = 0.55
"""The learning rate is constant after the warm-up and falls linearly from this share of the run."""

BALANCE = 0.003
"""Weight of the load-balancing loss: enough that no expert dies, too little to level them."""

PROMPT_WEIGHT = 0.05
"""Weight of a prompt character in the loss; an answer's weighs 1."""

SHORT_ROWS = (32, 96)
LONG_ROWS = (6, 512)
LONG_EVERY = 8
"""Every eighth step has long rows, so that the model also works deep inside a long context."""

EFFORT = {"add": 2.0, "sub": 2.0, "look": 2.0, "max": 1.5, "count": 1.5, "rev": 1.5, "sort": 1.5}
"""Shares of the harder tasks (the others: 1), further scaled by their error as training goes."""


@dataclass
class Plan:
    """What is to be run; everything that the result depends on."""

    steps: int
    seed: int
    out: Path
    state: Path
    check_every: int = 250
    octaves: float = OCTAVES
    shares: dict[str, float] = field(default_factory=lambda: _shares(dict.fromkeys(TASKS, 1.0)))


def tiny_config() -> Qwen3MoeConfig:
    """Return moe-tiny's shape."""
    shape = {
        "vocab_size": 64,
        "hidden_size": samples.MOE_TINY_HIDDEN,
        "intermediate_size": 2 * samples.MOE_TINY_HIDDEN,
        "moe_intermediate_size": samples.MOE_TINY_EXPERT_HIDDEN,
        "num_hidden_layers": samples.MOE_TINY_LAYERS,
        "num_experts": samples.MOE_TINY_EXPERTS,
        "num_experts_per_tok": samples.MOE_TINY_TOP_K,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "max_position_embeddings": MAX_LENGTH,
        "initializer_range": 0.06,
        "pad_token_id": PAD_ID,
        "bos_token_id": None,
        "eos_token_id": VOCABULARY[END],
    }
    return Qwen3MoeConfig(**shape)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that makes one token of every character."""
    tokenizer = Tokenizer(models.BPE(vocab=VOCABULARY, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        model_max_length=MAX_LENGTH,
    )


def batch(seed: int, step: int, shares: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """Return the ids of one step's rows and the loss weight of each as a target, both (B, S).

    A row is a run of whole items, cut at its end.
    """
    n_rows, length = LONG_ROWS if step % LONG_EVERY == 0 else SHORT_ROWS
    items = training_items(seed * 1_000_003 + step, shares)
    ids, weights = [], []
    for _ in range(n_rows):
        row_ids: list[int] = []
        row_weights: list[float] = []
        while len(row_ids) < length:
            item = next(items)
            row_ids += [VOCABULARY[letter] for letter in item.text]
            answer = len(item.text) - len(item.prompt)
            row_weights += [PROMPT_WEIGHT] * len(item.prompt) + [1.0] * answer
        ids.append(row_ids[:length])
        weights.append(row_weights[:length])
    return torch.tensor(ids), torch.tensor(weights)


def balance_loss(router_logits: Sequence[Tensor], top_k: int) -> Tensor:
    """Return E * sum(share of assignments * mean probability), averaged over the layers.

    It is 1 when all E experts are used equally (Switch Transformer, arXiv:2101.03961, eq. 4).
    """
    losses = []
    for logits in router_logits:
        n_experts = logits.shape[-1]
        probabilities = logits.softmax(-1)
        chosen = logits.detach().topk(top_k, dim=-1).indices
        counts = torch.bincount(chosen.reshape(-1), minlength=n_experts)
        losses.append(n_experts * (counts / counts.sum() * probabilities.mean(0)).sum())
    return torch.stack(losses).mean()


def rate(step: int, steps: int) -> float:
    """Return the learning rate of *step*, counted from 0."""
    warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
    decay = min(1.0, (steps - step) / (steps * (1 - DECAY_FROM)))
    return PEAK_RATE * warm_up * decay


def train(plan: Plan) -> Any:
    """Run *plan* from its saved state, if there is one, and return the trained model."""
    torch.manual_seed(plan.seed)
    fast_experts.register()
    model = Qwen3MoeForCausalLM(tiny_config())
    model.set_experts_implementation(fast_experts.FAST)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    kept = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": kept, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)
    first = _resume(plan, model, optimiser)

    began = time.perf_counter()
    for step in range(first, plan.steps):
        for group in optimiser.param_groups:
            group["lr"] = rate(step, plan.steps)
        loss, balance = _step(model, optimiser, *batch(plan.seed, step, plan.shares))
        done = step + 1
        if done % 50 == 0:
            per_step = (time.perf_counter() - began) / (done - first)
            log.info("step %d  loss %.4f  balance %.3f  %.3f s/step", done, loss, balance, per_step)
        if done % plan.check_every == 0 or done == plan.steps:
            _check(plan, model, done)
            _save_state(plan, model, optimiser, done)
            export(model, plan.out, plan.octaves)
    return model


def export(model: Any, out: Path, octaves: float = OCTAVES) -> None:
    """Save *model* in bfloat16, with its tokenizer, as a checkpoint that loads offline.

    The saved experts have channels as uneven as *octaves* says; see `spread_channels`.
    """
    stored = copy.deepcopy(model).to(torch.bfloat16)
    spread_channels(stored, octaves=octaves)
    stored.set_experts_implementation("eager")
    stored.generation_config = GenerationConfig(
        do_sample=False, pad_token_id=PAD_ID, eos_token_id=VOCABULARY[END]
    )
    stored.save_pretrained(out)
    # Stored in bfloat16, but to be computed in float32, which is what `dtype="auto"` reads.
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")
    tiny_tokenizer().save_pretrained(out)


def _step(
    model: Any, optimiser: torch.optim.Optimizer, ids: Tensor, weights: Tensor
) -> tuple[float, float]:
    outputs = model.model(input_ids=ids, use_cache=False, output_router_logits=True)
    logits = model.lm_head(outputs.last_hidden_state)[:, :-1]
    losses = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    target_weights = weights[:, 1:].flatten()
    loss = (losses * target_weights).sum() / target_weights.sum()
    balance = balance_loss(outputs.router_logits, model.config.num_experts_per_tok)
    torch.autograd.backward([loss + BALANCE * balance])
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return float(loss.detach()), float(balance.detach())


def _check(plan: Plan, model: Any, done: int) -> None:
    """Report accuracy, and set the tasks' shares by their error on fresh *training* items."""
    model.eval()
    tokenizer = tiny_tokenizer()
    fresh: list[Item] = []
    for name in TASKS:
        items = training_items(plan.seed * 1_000_003 - done, {name: 1.0})
        fresh += [next(items) for _ in range(40)]
    seen = summarise(fresh, [score.greedy for score in answer_scores(model, tokenizer, fresh)])
    held_out = held_out_items(20, seed=1)
    scores = answer_scores(model, tokenizer, held_out)
    held = summarise(held_out, [score.greedy for score in scores])
    model.train()
    plan.shares = _shares({name: 1 - seen.by_task[name].mean for name in TASKS})
    table = "  ".join(
        f"{name} {100 * seen.by_task[name].mean:.0f}/{100 * held.by_task[name].mean:.0f}"
        for name in TASKS
    )
    log.info("step %d  fresh/held-out %%: %s", done, table)
    log.info("step %d  held-out exact match %.3f", done, held.overall.mean)


def _shares(errors: Mapping[str, float]) -> dict[str, float]:
    return {name: EFFORT.get(name, 1.0) * (0.3 + error) for name, error in errors.items()}


def _save_state(plan: Plan, model: Any, optimiser: torch.optim.Optimizer, done: int) -> None:
    plan.state.parent.mkdir(parents=True, exist_ok=True)
    half = plan.state.with_suffix(".half")
    state = {
        "done": done,
        "seed": plan.seed,
        "shares": plan.shares,
        "model": model.state_dict(),
        "optimiser": optimiser.state_dict(),
    }
    torch.save(state, half)
    half.replace(plan.state)


def _resume(plan: Plan, model: Any, optimiser: torch.optim.Optimizer) -> int:
    """Load the saved state, if any, and return the number of steps it has done."""
    if not plan.state.exists():
        return 0
    state = torch.load(plan.state, weights_only=True)
    if state["seed"] != plan.seed:
        raise ValueError(
            f"{plan.state} was trained with seed {state['seed']}, not {plan.seed}; "
            "remove it or give the same --seed"
        )
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    plan.shares = state["shares"]
    done: int = state["done"]
    log.info("resuming after step %d", done)
    return done


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="Train moe-tiny.")
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, default=Path("build/moe-tiny-state.pt"))
    parser.add_argument("--octaves", type=float, default=OCTAVES, help="spread of saved channels")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--check-every", type=int, default=250)
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
    torch.set_num_threads(options.threads)
    plan = Plan(
        steps=options.steps,
        seed=options.seed,
        out=options.out,
        state=options.state,
        check_every=options.check_every,
        octaves=options.octaves,
    )
    export(train(plan), plan.out, plan.octaves)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
