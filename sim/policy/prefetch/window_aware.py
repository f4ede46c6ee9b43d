"""This module brings what is predicted, as far as it can land before it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from moetier.sim.policy.base import Prefetch
from moetier.sim.policy.prefetch.predicted import ranked
from moetier.sim.policy.seams import prefetch
from moetier.traces.batch import LayerBatch


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
        depth: int | list[int] = 1,
        max_candidates: int = 8,
        bandwidth: Literal["measured", "profile"] = "measured",
    ) -> None:
        self.predictor, self.max_candidates = predictor, max_candidates
        self.horizons = tuple(range(1, depth + 1)) if isinstance(depth, int) else tuple(depth)
        self.asks_lateness = bandwidth == "measured"

    def candidates(self, batch: LayerBatch, needed: list[int]) -> Sequence[int]:
        context = self.context
        estimates, lateness = context.estimates, context.lateness
        if estimates is None:
            return []
        queued = context.progress.ahead_bytes if lateness is None else lateness.queued_bytes()
        busy = estimates.copy_ns(queued) if queued else 0
        found: list[int] = []
        for horizon in self.horizons:
            wanted = [
                s
                for s in ranked(context, batch, horizon, 2 * context.layout.n_experts)
                if s not in context.resident and s not in found
            ]
            if not wanted:
                continue
            window = estimates.window_ns(batch, needed, horizon)
            for s in wanted[: self.max_candidates]:
                busy += estimates.copy_ns(context.layout.nbytes[s])
                if busy > window:
                    busy -= estimates.copy_ns(context.layout.nbytes[s])
                    break
                found.append(s)
        return found
