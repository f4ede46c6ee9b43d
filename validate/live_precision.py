"""This module gives a running model's experts the precision that a policy stores them at.

Weights are quantised and brought back before the run, in the groups the policy counts bytes for, so
the model computes with what a kernel for those codes would see. The originals are kept meanwhile,
which takes the experts' memory once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from moetier.sim.policy.base import Precision
from moetier.sim.policy.precision.uniform import Uniform
from moetier.traces.capture.find import MoeLayer
from moetier.traces.errors import InputError
from moetier.validate.numerics.groupwise import quantise

MOST_BITS = 8


def check_precision(precision: Precision) -> None:
    """Raise `InputError` for a precision that no running model can be given."""
    if not precision.alters_output:
        return
    if not isinstance(precision, Uniform):
        raise InputError(
            f"precision '{type(precision).__name__}' cannot be computed inside a model yet",
            where="policy.precision",
            way_out="use `full` or `uniform`, or simulate it on a trace",
        )
    if precision.bits > MOST_BITS:
        raise InputError(
            f"experts of {precision.bits} bits cannot be computed inside a model",
            where="policy.precision",
            way_out=f"use 1 to {MOST_BITS} bits, or `full`",
        )


@contextmanager
def computed_at(layers: Sequence[MoeLayer], precision: Precision) -> Iterator[None]:
    """Let the experts of *layers* have *precision* until the block ends; then they are as before.

    Raises `InputError` for a precision that cannot be had, and for experts whose input has no whole
    number of groups.
    """
    check_precision(precision)
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        if isinstance(precision, Uniform):
            for stack, transposed in _stacks(layers):
                kept.append((stack, stack.clone()))
                stack.copy_(_rounded(stack, precision, transposed))
        yield
    finally:
        for stack, original in kept:
            stack.copy_(original)


def _stacks(layers: Sequence[MoeLayer]) -> Iterator[tuple[Tensor, bool]]:
    """Yield the matrices of all experts of a layer, and whether they are (E, in, out)."""
    for where in layers:
        for value in where.experts.parameters():
            if value.dim() == 3 and len(value) == where.n_experts:
                yield value.data, bool(where.experts.is_transposed)


def _rounded(stack: Tensor, precision: Uniform, transposed: bool) -> Tensor:
    """Return *stack* as it comes back from its codes, expert by expert to save memory."""
    result = torch.empty_like(stack)
    for source, target in zip(stack, result, strict=True):
        matrix = source.T if transposed else source  # (out, in)
        try:
            made = quantise(matrix.float(), precision.bits, precision.group).weights()
        except ValueError as error:
            raise InputError(str(error), where="policy.precision.group") from None
        target.copy_(made.T if transposed else made)
    return result
