"""This module raises the scores of cached experts before the choice, by a share of their range."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from moetier.sim.policy.base import Context, Progress, Routing
from moetier.sim.policy.routing.rerouting import (
    cached_experts,
    ranking,
    rerouted,
    router_choice,
    scores_of,
)
from moetier.sim.policy.seams import routing
from moetier.sim.units import parse_share
from moetier.traces.batch import DECODE, Floats, LayerBatch
from moetier.traces.errors import InputError
from moetier.traces.gating import GateRule
from moetier.traces.registry import Natural, Share

Strength = Annotated[float, Field(ge=0, allow_inf_nan=False)]

LEAST_SHARE = 1e-9
"""What a probability is raised to before its logarithm is taken: a softmax may underflow."""

EVERY = 4  # decode steps between two corrections of the strength
GAIN = 0.05  # of the strength, per miss rate in units of the target
LARGEST_MOVE = 0.1
LARGEST = 1.0  # the whole range of the scores: beyond, hardly any choice changes


@routing.register("cache-prior")
class CachePrior(Routing):
    """Run, in decode, the top-k after cached experts and the top J got a head start.

    With z the scores of a token, z' = z + strength * D * mask, where the mask holds the cached
    experts and the *top* likeliest, and D is a running mean of max z - min z (per layer, *ema* of
    the old mean and the rest of the new range, averaged over the tokens of a batch; it begins with
    the first range). The top-k of z' are weighed by z (cache-conditional experts, arXiv
    2412.00099). A router that limits itself to groups of experts is not limited any more.

    Logits are taken as they are. Of probabilities the logarithm is taken, which is the logits but
    for a constant, so that both mean the same. Sigmoids stay as they are, since the bias of the
    families that use them is added there.

    With *miss_rate* (0.05, or "5 %") the strength is only where it begins: after *after* decode
    steps it follows the demand fetches per look-up of the last few steps, within 0 and 1. Whether
    the target can be kept depends on the capacity and on *top*, whose experts are fetched whatever
    the strength.
    """

    needs_scores = True
    follows_cache = True

    def __init__(
        self,
        strength: Strength = 0.2,
        top: Natural = 2,
        ema: Share = 0.99,
        miss_rate: float | str | None = None,
        after: Natural = 10,
    ) -> None:
        if isinstance(miss_rate, str):
            miss_rate = float(parse_share(miss_rate))
        if miss_rate is not None and not 0 < miss_rate < 1:
            raise InputError(
                f"routing 'cache-prior': miss_rate is {miss_rate}",
                way_out="use a share between 0 and 1, or leave it out",
            )
        self.initial, self.top, self.ema = strength, top, ema
        self.miss_rate, self.after = miss_rate, after
        self.counts_demand = miss_rate is not None
        self.alters_output = strength > 0 or miss_rate is not None

    def start(self, context: Context) -> None:
        super().start(context)
        self.strength = self.initial
        self._range: list[float | None] = [None] * context.layout.n_layers
        self._control = _Control(self.miss_rate, self.after) if self.miss_rate else None

    def route(self, batch: LayerBatch) -> LayerBatch:
        gate = self.context.gate
        if batch.phase != DECODE or not self.alters_output or gate is None:
            return batch
        scores = scores_of(batch)
        if self._control is not None and batch.layer == 0:
            self.strength = self._control.corrected(self.strength, self.context.progress)
        values = _additive(scores, gate)
        spread = self._averaged(batch.layer, float(np.ptp(values, axis=1).mean()))
        chosen = router_choice(batch, values.shape[1])
        mask = np.tile(cached_experts(self.context, batch.layer), (len(values), 1))
        np.put_along_axis(mask, ranking(chosen, -values)[:, : self.top], True, axis=1)
        if not self.strength or mask.all():
            return batch
        lifted = values + self.strength * spread * mask
        return rerouted(batch, gate, scores, ranking(chosen, -lifted, -values))

    def _averaged(self, layer: int, new: float) -> float:
        """Return the running mean of a layer's range, *new* included."""
        old = self._range[layer]
        found = new if old is None else self.ema * old + (1 - self.ema) * new
        self._range[layer] = found
        return found


class _Control:
    """An integrating controller of the strength: it rests where the miss rate is the target."""

    def __init__(self, target: float, after: int) -> None:
        self._target, self._next = target, after + EVERY
        self._after, self._lookups, self._fetches = after, 0, 0

    def corrected(self, strength: float, progress: Progress) -> float:
        """Return the strength of the step that begins; *progress* counts what came before it."""
        done = progress.decode_steps
        if done <= self._after:  # what comes before is not judged
            self._lookups, self._fetches = progress.lookups, progress.fetches
        if done < self._next:
            return strength
        lookups = progress.lookups - self._lookups
        rate = (progress.fetches - self._fetches) / lookups if lookups else 0.0
        self._lookups, self._fetches = progress.lookups, progress.fetches
        self._next = done + EVERY
        move = min(GAIN * (rate / self._target - 1), LARGEST_MOVE)
        return min(max(strength + move, 0.0), LARGEST)


def _additive(scores: Floats, gate: GateRule) -> npt.NDArray[np.float64]:
    """Return *scores* (V, E) where adding a constant to some is a fair head start."""
    values = scores.astype(np.float64)
    if gate.score_kind != "probabilities":
        return values
    logs: npt.NDArray[np.float64] = np.log(np.maximum(values, LEAST_SHARE))
    return logs
