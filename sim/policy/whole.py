"""This module finds the experts of which nothing is there, so that none is ever half computed."""

from __future__ import annotations

from moetier.sim.policy.base import Context


def absent(context: Context, missing: list[int]) -> list[int]:
    """Return those of a batch's *missing* slices whose expert has no resident part at all.

    Of the others a part is there already, and what is missing is best brought to it.
    """
    parts, resident = context.layout.n_parts, context.resident
    if parts == 1:
        return missing
    firsts = {s - s % parts for s in missing}
    gone = {s for s in firsts if not any(part in resident for part in range(s, s + parts))}
    return [s for s in missing if s - s % parts in gone]
