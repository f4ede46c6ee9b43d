"""This module brings what is predicted, as far as it can land before it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Literal

from moetier.sim.policy.base import Context, Prefetch
from moetier.sim.policy.prefetch.predicted import ranked
from moetier.sim.policy.seams import prefetch
from moetier.traces.batch import LayerBatch
from moetier.traces.registry import Positive


@prefetch.register("window-aware")
class WindowAware(Prefetch):
    """Bring the likeliest experts whose copies end inside the window.

    At most *max_candidates* a layer, after SpecPrefetch (arXiv 2607.24787). The window of a layer
    is the compute time until its experts begin; what is already on its way goes first. Experts are
    ranked by predicted probability summed over the batch's tokens; resident ones and those on their
    way are passed over. With `bandwidth: measured` the machine says what is queued, so decisions
    depend on timing; with `profile` everything ordered early and not used yet counts as queued.
    """

    uses_predictions = True

    def __init__(
        self,
        predictor: str | None = None,
        depth: Positive | list[Positive] = 1,
        max_candidates: Positive = 8,
        bandwidth: Literal["measured", "profile"] = "measured",
    ) -> None:
        self.predictor, self.max_candidates = predictor, max_candidates
        self.horizons = tuple(range(1, depth + 1)) if isinstance(depth, int) else tuple(depth)
        self.asks_lateness = bandwidth == "measured"

    def start(self, context: Context) -> None:
        super().start(context)
        least = min(context.layout.nbytes)
        self._least = context.estimates.copy_ns(least) if context.estimates else 0

    def candidates(self, batch: LayerBatch, needed: list[int]) -> Sequence[int]:
        context = self.context
        estimates, lateness, resident = context.estimates, context.lateness, context.resident
        if estimates is None:
            return []
        queued = context.progress.ahead_bytes if lateness is None else lateness.queued_bytes()
        busy = estimates.copy_ns(queued) if queued else 0
        found: list[int] = []
        for horizon in self.horizons:
            window = estimates.window_ns(batch, needed, horizon)
            if busy + self._least > window:
                continue  # not even the smallest would land in time, so nobody need be ranked
            wanted = (s for s in ranked(context, batch, horizon, None) if s not in resident)
            for s in islice(wanted, self.max_candidates):
                took = estimates.copy_ns(context.layout.nbytes[s])
                if busy + took > window:
                    break
                busy += took
                found.append(s)
        return found
