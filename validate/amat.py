"""This module asks what the zero-point is worth in nested quantisation, by executing moe-tiny.

``python -m moetier.validate.amat`` prints, for experts of 8/4, 6/3 and 4/2 bits, how well the model
answers from both slices, from the MSB slice alone (AMAT), and from each ablation of
`numerics.variants`; how the MSB slice compares with experts quantised independently; what became
of the weights; and what the slices weigh and cost to build. Both slices and the MSB slice alone are
read back from a store on disk.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from moetier.traces.capture.describe import describe
from moetier.traces.capture.find import MoeLayer, find_moe_layers
from moetier.traces.capture.probe import probe
from moetier.traces.errors import InputError
from moetier.traces.formats import bit_slice_bytes
from moetier.traces.samples import moe_tiny_path
from moetier.traces.samples.tasks import TASKS, Item, held_out_items, most_held_out
from moetier.validate.accuracy import answer_scores, estimate, paired_difference, summarise
from moetier.validate.amat_report import Comparison, Report, Storage, WeightError, weight_error
from moetier.validate.numerics.experts import ExpertMatrices, rewritten, stacked_matrices
from moetier.validate.numerics.groupwise import GROUP
from moetier.validate.numerics.slice_store import build_slices, open_slices
from moetier.validate.numerics.variants import VARIANTS, Variant
from moetier.validate.sensitivity import Row

SPLITS = ((8, 4), (6, 3), (4, 2))
_LABELS = {"high": "both slices", "nested": "MSB slice (AMAT)"}
Advance = Callable[[str], None]
"""Takes what was done."""


def measure(
    model: Any,
    tokenizer: Any,
    items: Sequence[Item],
    group: int = GROUP,
    advance: Advance | None = None,
) -> Report:
    """Score *items* with the experts of *model*, a Qwen3MoeForCausalLM, whole and as each variant.

    Raises:
        InputError: If *group* does not divide the experts' rows, or a weight is no number.
    """
    layers = find_moe_layers(model)
    weights = list(_weights(layers))
    rows: list[Row] = []
    errors: list[WeightError] = []
    nll: dict[str, list[float]] = {}

    def score(name: str, damage: AbstractContextManager[None]) -> None:
        with damage:
            scores = answer_scores(model, tokenizer, items)
            errors.append(weight_error(name, weights))
        nll[name] = [found.nll for found in scores]
        accuracy = summarise(items, [found.greedy for found in scores])
        rise = paired_difference(nll[name], nll["full"])
        rows.append(Row(name, accuracy, estimate(nll[name]), rise))
        if advance is not None:
            advance(name)

    score("full", nullcontext())
    storage = []
    with tempfile.TemporaryDirectory() as folder:
        for high, low in SPLITS:
            path = Path(folder) / f"{high}-{low}.slices"
            storage.append(_store(model, layers, path, high, low, group))
            for name, variant in VARIANTS.items():
                if name in _LABELS:
                    damage = _stored(path, model, layers, lsb=name == "high")
                else:
                    damage = rewritten(layers, partial(_changed, variant, high, low, group))
                score(f"{high}/{low} {_LABELS.get(name, name)}", damage)
    return Report(rows, errors, _comparisons(rows, nll), storage)


def _weights(layers: Sequence[MoeLayer]) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield every stack of matrices, a copy, and the size of its inputs if a norm makes them."""
    for where in layers:
        norm: Any = where.decoder.post_attention_layernorm
        for name, matrix in stacked_matrices(where).matrices().items():
            yield matrix, matrix.clone(), None if name == "down" else norm.weight.detach()


def _comparisons(rows: Sequence[Row], nll: Mapping[str, list[float]]) -> list[Comparison]:
    right = {row.perturbation: [float(x) for x in row.accuracy.correct] for row in rows}
    comparisons = []
    for split in (f"{high}/{low}" for high, low in SPLITS):
        ours, theirs = f"{split} {_LABELS['nested']}", f"{split} independent"
        exact = paired_difference(right[ours], right[theirs])
        comparisons.append(Comparison(split, exact, paired_difference(nll[ours], nll[theirs])))
    return comparisons


def _store(
    model: Any, layers: Sequence[MoeLayer], path: Path, high: int, low: int, group: int
) -> Storage:
    """Write the slices of *model* to *path*, read them once, and say what that took."""
    start = perf_counter()
    how = build_slices(model, path, high, low, group)
    built = perf_counter()
    with _stored(path, model, layers, lsb=True):
        read = perf_counter()
    return Storage(
        split=f"{high}/{low}",
        msb_bytes=how.nbytes[0],
        lsb_bytes=how.nbytes[1],
        charged_bytes=bit_slice_bytes(describe(model, probe(model)), high, low, group),
        file_bytes=path.stat().st_size,
        build_s=built - start,
        read_s=read - built,
    )


@contextmanager
def _stored(path: Path, model: Any, layers: Sequence[MoeLayer], *, lsb: bool) -> Iterator[None]:
    with open_slices(path, model) as store, store.computed(layers, lsb=lsb):
        yield


def _changed(
    variant: Variant, high: int, low: int, group: int, where: MoeLayer, stack: ExpertMatrices
) -> dict[str, Tensor]:
    return {
        name: variant(matrix.float(), high, low, group) for name, matrix in stack.matrices().items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(description="Measure what nested bit slices cost moe-tiny.")
    most = most_held_out() * len(TASKS)
    parser.add_argument("--items", type=int, default=most, help=f"test items, at most {most}")
    parser.add_argument("--model", type=Path, default=moe_tiny_path(), help="checkpoint directory")
    parser.add_argument("--group", type=int, default=GROUP, help="weights that share a scale")
    parser.add_argument("--seed", type=int, default=0, help="seed of the test items")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if not len(TASKS) <= options.items <= most:
        parser.error(
            f"--items {options.items} is out of range; give {len(TASKS)} to {most} "
            f"({len(TASKS)} tasks share them equally)"
        )
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    items = held_out_items(options.items // len(TASKS), options.seed)
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("full", total=1 + len(SPLITS) * len(VARIANTS))

        def advance(name: str) -> None:
            progress.update(bar, advance=1, description=name)

        try:
            report = measure(model, tokenizer, items, options.group, advance)
        except InputError as error:
            parser.error(str(error))
    sys.stdout.write((report.json() if options.json else report.text()) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
