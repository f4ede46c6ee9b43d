"""This module brings what is predicted, as far as it can land before it is needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        if context.estimates is None:
            return
        copy_ns, layout = context.estimates.copy_ns, context.layout
        self._took = {nbytes: copy_ns(nbytes) for nbytes in {0, *layout.nbytes}}
        self._least = min([self._took[nbytes] for nbytes in set(layout.nbytes)])

    def candidates(self, batch: LayerBatch, needed: list[int]) -> Sequence[int]:
        context = self.context
        estimates, lateness = context.estimates, context.lateness
        if estimates is None:
            return []
        queued = context.progress.ahead_bytes if lateness is None else lateness.queued_bytes()
        busy = self._took.get(queued)  # most often nothing, or one
        if busy is None:
            busy = estimates.copy_ns(queued)
        found: list[int] = []
        for horizon in self.horizons:
            # With less room than the smallest copy takes, nobody need be ranked.
            room = estimates.window_ns(batch, needed, horizon) - busy
            if room >= self._least:
                chosen, took = self._fitting(ranked(context, batch, horizon, None), room)
                found += chosen
                busy += took
        return found

    def _fitting(self, likeliest: Iterable[int], room: int) -> tuple[list[int], int]:
        """Return the first ones not resident whose copies take *room* ns together, and that time.

        There is room for one. No more are asked for than can be brought.
        """
        resident, nbytes, least = self.context.resident, self.context.layout.nbytes, self._least
        found: list[int] = []
        left = room
        for s in likeliest:
            if s in resident:
                continue
            took = self._took[nbytes[s]]
            if took > left:
                break
            left -= took
            found.append(s)
            if left < least or len(found) == self.max_candidates:
                break
        return found, room - left
