"""This module picks the hottest slices that fit, from the counts of a profile."""

from __future__ import annotations

from moetier.sim.policy.base import Context


def hottest(context: Context) -> list[int]:
    """Return the most used slices that fit in the capacity, least used first.

    Ties, and all slices when there is no profile, go by expert index within the layer, so that
    every layer gets the same share.
    """
    layout, counts = context.layout, context.popularity
    order = range(len(layout.nbytes))
    ranked = sorted(order, key=lambda s: (-counts[s] if counts else 0, s % layout.layer_slices, s))
    room, chosen = context.capacity, []
    for s in ranked:
        if layout.nbytes[s] > room:
            break
        room -= layout.nbytes[s]
        chosen.append(s)
    return chosen[::-1]
