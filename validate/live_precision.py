"""This module gives a running model's experts the precisions that a policy computes them at.

Weights are quantised and brought back before the run, in the groups the policy counts bytes for, so
the model computes with what a kernel for those codes would see. A policy with several formats gets
the experts several times over, one format after the other: expert *e* in format *v* answers to the
id `v * n_experts + e`, and the implementation the model had computes all of them in one call. The
originals are kept meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moetier.sim.policy.base import ExpertFormat, Precision
from moetier.sim.policy.precision.channels import Channels
from moetier.traces.capture.find import MoeLayer
from moetier.traces.errors import InputError
from moetier.validate.numerics.experts import require_finite
from moetier.validate.numerics.groupwise import quantise

MOST_BITS = 8


def check_precision(precision: Precision) -> None:
    """Raise `InputError` for a precision that no running model can be given."""
    if isinstance(precision, Channels):  # its experts are as stored: see `live_channels`
        return
    if precision.alters_output and list(precision.formats) == [ExpertFormat()]:
        raise InputError(
            f"precision '{type(precision).__name__}' cannot be computed inside a model",
            where="policy.precision",
            way_out="use one that says in which formats, or simulate it on a trace",
        )
    for kind in precision.formats:
        most = max(kind.bits or 0, kind.inside or 0)
        if most > MOST_BITS:
            raise InputError(
                f"experts of {most} bits cannot be computed inside a model",
                where="policy.precision",
                way_out=f"use 1 to {MOST_BITS} bits, or `full`",
            )


@contextmanager
def computed_at(layers: Sequence[MoeLayer], precision: Precision) -> Iterator[None]:
    """Let the experts of *layers* have every format of *precision* until the block ends.

    Raises `InputError` for a precision that cannot be had, and for experts whose input has no whole
    number of groups, or with weights that are NaN or infinite.
    """
    check_precision(precision)
    with ExitStack() as stack:
        if list(precision.formats) != [ExpertFormat()]:
            for where in layers:
                stack.enter_context(_laid_out(where, precision.formats))
        yield


@contextmanager
def _laid_out(where: MoeLayer, formats: Sequence[ExpertFormat]) -> Iterator[None]:
    """Let one layer's experts be there once per format."""
    experts, n = where.experts, where.n_experts
    kept = [(value, value.data) for value in experts.parameters() if len(value) == n]
    try:
        for value, original in kept:
            value.data = torch.cat([_in_format(where, original, kind) for kind in formats])
        if len(formats) > 1:
            experts.forward = partial(_as_many, experts, type(experts).forward, n * len(formats))
        yield
    finally:
        for value, original in kept:
            value.data = original
        experts.__dict__.pop("forward", None)


def _as_many(
    experts: Any, forward: Callable[..., Any], n_experts: int, *args: Any, **kwargs: Any
) -> Any:
    """Compute as a module of *n_experts*; to all others it keeps the number it had."""
    kept = experts.num_experts
    experts.num_experts = n_experts
    try:
        return forward(experts, *args, **kwargs)
    finally:
        experts.num_experts = kept


def _in_format(where: MoeLayer, stack: Tensor, kind: ExpertFormat) -> Tensor:
    """Return all experts' *stack* as it comes back from *kind*; biases stay as they are."""
    if kind.bits is None or stack.dim() != 3:
        return stack
    require_finite(where.name, stack)
    transposed = bool(where.experts.is_transposed)
    result = torch.empty_like(stack)
    for source, target in zip(stack, result, strict=True):  # expert by expert, to save memory
        matrix = source.T if transposed else source  # (out, in)
        made = _requantised(matrix.float(), kind)
        target.copy_(made.T if transposed else made)
    return result


def _requantised(matrix: Tensor, kind: ExpertFormat) -> Tensor:
    assert kind.bits is not None
    try:
        fine = quantise(matrix, kind.inside or kind.bits, kind.group, half_scales=True)
    except ValueError as error:
        raise InputError(str(error), where="policy.precision.group") from None
    return (fine.nested(kind.bits) if kind.inside else fine).weights()
