"""This module asks how much moe-tiny's experts matter: it damages them and measures the cost.

``python -m moetier.validate.sensitivity`` prints one table per task for the undamaged model and
one for the perturbations, on test items that were never trained on (finite tables excepted).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from moetier.traces.capture.find import MoeLayer, find_moe_layers
from moetier.traces.samples import moe_tiny_path
from moetier.traces.samples.tasks import TASKS, Item, held_out_items, most_held_out
from moetier.validate.accuracy import (
    Accuracy,
    Difference,
    Estimate,
    answer_nll,
    estimate,
    exact_match,
    paired_difference,
)
from moetier.validate.numerics.experts import ExpertMatrices, rewritten
from moetier.validate.numerics.groupwise import requantised


@dataclass(frozen=True, slots=True)
class Row:
    """What one perturbation costs; *nll_rise* is against the undamaged model, item by item."""

    perturbation: str
    accuracy: Accuracy
    nll: Estimate
    nll_rise: Difference


def reweighted(
    model: nn.Module, bits: int, nested: int | None = None
) -> AbstractContextManager[None]:
    """Give *model* experts of *bits* bits (or of the *nested* highest of them) while inside."""

    def change(where: MoeLayer, stack: ExpertMatrices) -> dict[str, Tensor]:
        return {name: requantised(w, bits, nested) for name, w in stack.matrices().items()}

    return rewritten(find_moe_layers(model), change)


@contextmanager
def misrouted(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """Send every token to distinct random experts, with the routed ones' weights, while inside."""
    rng = torch.Generator().manual_seed(seed)

    def reroute(module: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, index, weights = arguments
        scores = torch.rand(len(index), module.num_experts, generator=rng)
        chosen = scores.topk(index.shape[1], dim=-1).indices
        return hidden, chosen.to(index.device), weights

    with ExitStack() as stack:
        for where in find_moe_layers(model):
            handle = where.experts.register_forward_pre_hook(reroute)
            stack.callback(handle.remove)
        yield


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    yield


PERTURBATIONS: Mapping[str, Any] = {
    "full": _unchanged,
    "8-bit experts": partial(reweighted, bits=8),
    "4-bit experts": partial(reweighted, bits=4),
    "3-bit experts nested in 6": partial(reweighted, bits=6, nested=3),
    "2-bit experts nested in 4": partial(reweighted, bits=4, nested=2),
    "1-bit experts": partial(reweighted, bits=1),
    "random experts": misrouted,
}
"""Context managers that damage a model for as long as they are entered; the first does not."""


def measure(model: Any, tokenizer: Any, items: Sequence[Item]) -> list[Row]:
    """Return one row per perturbation, in the order of `PERTURBATIONS`."""
    rows: list[Row] = []
    baseline: list[float] = []
    for name, perturbation in PERTURBATIONS.items():
        with perturbation(model):
            nll = answer_nll(model, tokenizer, items)
            accuracy = exact_match(model, tokenizer, items)
        baseline = baseline or nll
        rows.append(Row(name, accuracy, estimate(nll), paired_difference(nll, baseline)))
    return rows


def task_table(accuracy: Accuracy) -> str:
    """Format exact match per task as a Markdown table."""
    lines = [
        "| task | items | exact match | held out |",
        "|------|------:|------------:|:---------|",
    ]
    for name, value in accuracy.by_task.items():
        held_out = "no: finite table" if TASKS[name].finite else "yes"
        lines.append(f"| {name} | {value.n} | {_percent(value)} | {held_out} |")
    overall = accuracy.overall
    lines.append(f"| **all** | {overall.n} | {_percent(overall)} | |")
    return "\n".join(lines)


def perturbation_table(rows: Sequence[Row]) -> str:
    """Format the cost of the perturbations as a Markdown table; NLL is in nats per answer."""
    lines = [
        "| experts | exact match | NLL | paired rise in NLL (95 % interval) |",
        "|---------|------------:|----:|-----------------------------------:|",
    ]
    for row in rows:
        rise = row.nll_rise
        lines.append(
            f"| {row.perturbation} | {_percent(row.accuracy.overall)} "
            f"| {row.nll.mean:.4f} ± {row.nll.standard_error:.4f} "
            f"| {rise.mean:.4f} ({rise.low:.4f} to {rise.high:.4f}) |"
        )
    return "\n".join(lines)


def as_json(rows: Sequence[Row]) -> str:
    """Format everything measured, item by item outcomes excepted, as JSON."""
    plain = []
    for row in rows:
        record = asdict(row)
        del record["accuracy"]["correct"]
        plain.append(record)
    return json.dumps(plain, indent=2)


def _percent(value: Estimate) -> str:
    return f"{100 * value.mean:.2f} ± {100 * value.standard_error:.2f} %"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(description="Measure what damage to moe-tiny's experts costs.")
    most = most_held_out() * len(TASKS)
    parser.add_argument("--items", type=int, default=most, help=f"test items, at most {most}")
    parser.add_argument("--model", type=Path, default=moe_tiny_path(), help="checkpoint directory")
    parser.add_argument("--seed", type=int, default=0, help="seed of the test items")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    per_task = options.items // len(TASKS)
    if not len(TASKS) <= options.items <= most:
        parser.error(
            f"--items {options.items} is out of range; give {len(TASKS)} to {most} "
            f"({len(TASKS)} tasks share them equally)"
        )
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = measure(model, tokenizer, held_out_items(per_task, options.seed))
    if options.json:
        sys.stdout.write(as_json(rows) + "\n")
    else:
        sys.stdout.write(task_table(rows[0].accuracy) + "\n\n" + perturbation_table(rows) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
