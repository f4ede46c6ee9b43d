"""This module refuses by name what does not fit together: parts, slices and what a source knows."""

from __future__ import annotations

from moetier.sim.layout import Layout
from moetier.sim.policy.base import Part
from moetier.sim.policy.compose import Policy
from moetier.traces.errors import InputError
from moetier.traces.schema import Header


def check_fit(policy: Policy, layout: Layout, header: Header) -> None:
    """Raise `InputError` for a part of *policy* that finds nothing to work on.

    Whether each single row of a trace has weights is known only when it is read.
    """
    if policy.precision.where_sketches_are and policy.miss.computes_below:
        raise InputError(
            f"'{_name(policy.precision)}' is computed where its sketches are, in the fastest tier, "
            f"and '{_name(policy.miss)}' computes in the one below",
            where="policy.miss",
            way_out="use `miss: fetch` or `skip`",
        )
    for seam, part in _by_seam(policy):
        if part.follows_cache and policy.needs_future:
            raise InputError(
                f"'{_name(part)}' goes by what is cached, so that no oracle can foresee what is "
                "needed",
                where=f"policy.{seam}",
                way_out="use it without `belady` and `oracle`",
            )
        if part.draws and policy.needs_future:
            raise InputError(
                f"'{_name(part)}' draws what is needed, so that no oracle can foresee it",
                where=f"policy.{seam}",
                way_out="use `unit: expert`, or no `belady` and `oracle`",
            )
        if part.needs_bit_slices and not layout.bit_sliced:
            raise InputError(
                f"'{_name(part)}' is about MSB and LSB slices, and experts have none here",
                where=f"policy.{seam}",
                way_out="add `precision: bit-sliced`, or use another one",
            )
        if part.needs_scores and header.score_kind in ("none", "unknown"):
            raise InputError(
                f"'{_name(part)}' reads router scores, which the source does not have",
                where=f"policy.{seam}",
                way_out="use a trace that `moetier capture` made, or `synthetic:`",
            )
        if part.needs_weights and "weights" in header.unknown:
            raise InputError(
                f"'{_name(part)}' reads gate weights, which the source does not have",
                where=f"policy.{seam}",
                way_out="use a trace that has them",
            )


def _by_seam(policy: Policy) -> list[tuple[str, Part]]:
    names = ("routing", "precision", "prefetch", "warmup", "miss")
    seams = list(zip(names, policy.shared_parts, strict=True))
    return [*seams, *(("eviction", part) for part in policy.eviction)]


def _name(part: Part) -> str:
    return type(part).__name__
