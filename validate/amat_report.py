"""This module holds what `validate.amat` measures, and prints it.

Shapes: E experts of a layer, each a matrix of rows x columns.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from moetier.validate.accuracy import Difference
from moetier.validate.sensitivity import Row, as_json, perturbation_table


@dataclass(frozen=True, slots=True)
class WeightError:
    """How far weights are from the original ones; *name* is that of the row of answers."""

    name: str
    squared: float  # sum of squared errors over the sum of squared weights
    mean: float  # mean error, which a sum over inputs adds up, over the mean size of a weight
    zeros: float  # share of weights that have become 0
    kept: float  # slope of gate and up weights on the original ones, each times its input's size


@dataclass(frozen=True, slots=True)
class Comparison:
    """The MSB slice against experts quantised to as many bits on their own, item by item."""

    split: str
    exact_match: Difference
    nll: Difference


@dataclass(frozen=True, slots=True)
class Storage:
    """What the slices of a model weigh, in bytes, and how long they take, in seconds."""

    split: str
    msb_bytes: int  # of an expert, packed
    lsb_bytes: int
    charged_bytes: tuple[int, int]  # what `bit_slice_bytes` says
    file_bytes: int  # all experts, checksums and header
    build_s: float  # quantise, pack, hash and write
    read_s: float  # hash the model, read, check, unpack and write into it


@dataclass(frozen=True, slots=True)
class Report:
    """All that was measured."""

    rows: list[Row]
    errors: list[WeightError]
    comparisons: list[Comparison]
    storage: list[Storage]

    def text(self) -> str:
        """Return everything as Markdown tables."""
        tables = (
            perturbation_table(self.rows),
            comparison_table(self.comparisons),
            error_table(self.errors),
            storage_table(self.storage),
        )
        return "\n\n".join(tables)

    def json(self) -> str:
        """Return everything, the outcomes item by item excepted, as JSON."""
        plain = {
            "rows": json.loads(as_json(self.rows)),
            "errors": [asdict(row) for row in self.errors],
            "comparisons": [asdict(row) for row in self.comparisons],
            "storage": [asdict(row) for row in self.storage],
        }
        return json.dumps(plain, indent=2)


def weight_error(name: str, tensors: Iterable[tuple[Tensor, Tensor, Tensor | None]]) -> WeightError:
    """Compare tensors, (..., columns), with their originals, which come second.

    Third comes the size of each input, (columns), where it is known: a slope below 1 says that what
    matters most was made smaller, however small the squared error.
    """
    squared = power = mean = size = slope = scale = 0.0
    zeros = count = 0
    for new, original, inputs in tensors:
        if inputs is not None:
            x, y = (original * inputs).double(), (new * inputs).double()
            slope += float((x * y).sum())
            scale += float(x.square().sum())
        error = (new - original).double()
        squared += float(error.square().sum())
        mean += float(error.sum())
        power += float(original.double().square().sum())
        size += float(original.double().abs().sum())
        zeros += int(torch.count_nonzero(new == 0))
        count += new.numel()
    return WeightError(name, squared / power, mean / size, zeros / count, slope / scale)


def comparison_table(comparisons: Sequence[Comparison]) -> str:
    """Format MSB slices against independent experts as a Markdown table; NLL in nats an answer."""
    lines = [
        "| MSB slice minus independent | exact match, points (95 % interval) | NLL |",
        "|-----------------------------|------------------------------------:|----:|",
    ]
    for row in comparisons:
        right, nll = row.exact_match, row.nll
        lines.append(
            f"| {row.split} | {100 * right.mean:.2f} ({100 * right.low:.2f} to "
            f"{100 * right.high:.2f}) | {nll.mean:.4f} ({nll.low:.4f} to {nll.high:.4f}) |"
        )
    return "\n".join(lines)


def error_table(errors: Sequence[WeightError]) -> str:
    """Format what happened to the weights as a Markdown table, in per cent."""
    lines = [
        "| experts | squared error of the weights | mean error | weights at 0 | size kept |",
        "|---------|-----------------------------:|-----------:|-------------:|----------:|",
    ]
    lines += [
        f"| {row.name} | {100 * row.squared:.2f} % | {100 * row.mean:.1f} % "
        f"| {100 * row.zeros:.1f} % | {100 * row.kept:.1f} % |"
        for row in errors
    ]
    return "\n".join(lines)


def storage_table(storage: Sequence[Storage]) -> str:
    """Format the slices' sizes and times as a Markdown table."""
    lines = [
        "| bits | MSB | LSB | charged for them | store | built in | read in |",
        "|------|----:|----:|-----------------:|------:|---------:|--------:|",
    ]
    for row in storage:
        msb, lsb = row.charged_bytes
        lines.append(
            f"| {row.split} | {row.msb_bytes:,} B | {row.lsb_bytes:,} B | {msb:,} B, {lsb:,} B "
            f"| {row.file_bytes / 1e6:.2f} MB | {row.build_s:.2f} s | {row.read_s:.2f} s |"
        )
    return "\n".join(lines)
