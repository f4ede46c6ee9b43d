"""This module reads of every expert only the channels that matter to a token."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar, Literal

import numpy as np

from moetier.sim.layout import Layout
from moetier.sim.policy.base import Context, Precision
from moetier.sim.policy.seams import precision
from moetier.sim.units import parse_percent
from moetier.traces.batch import Bools, LayerBatch
from moetier.traces.channels import ChannelCost, channel_cost
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.traces.registry import Positive

RANK = 16  # of the recovery maps, where none is given
_DRAWN = 1 << 22  # random numbers at a time


@precision.register("channels")
class Channels(Precision):
    """Read a sketch of every expert, and exactly only the channels it says matter to the token.

    *reads* is the target share of an expert's bytes, sketch and recovery maps included, as a number
    or "17.8 %"; what is left after these buys k channels (`traces.channels`). By the rule `top-k`
    every token keeps its k best channels, by `threshold` those that score above what keeps k on
    average of other texts. The skipped ones go through a low-rank map of rank *rank*, or are lost
    (`recovery: none`). By `token-top-k` a token keeps the k best per expert of all its experts'
    channels together. *group* inputs share a scale of the sketch, a whole row by default. After
    Kim & Hwang, "Channel Selection for MoE Decoding Needs No Calibration Data".

    Whole experts are cached and moved, and compute reads less of them; or, with `unit: block`, an
    expert's channels lie in *blocks* equal parts, of which only those are looked up that hold a
    kept channel. Sketches and maps stay in the fastest tier, beside the cache. A batch reads the
    union of what its tokens keep. Operations are counted as for whole experts: screening takes two
    thirds of them, the kept channels and the maps most of the rest.

    A trace does not know which channels matter; there, k of them are drawn for every token and
    expert, and blocks cannot be foreseen by an oracle. A live model says which.
    """

    alters_output = True
    kernel = "channels"
    where_sketches_are = True
    example: ClassVar[dict[str, Any]] = {  # rows of a toy are short beside a sector
        "reads": "150 %",
        "recovery": "none",
        "unit": "block",
        "blocks": 2,
    }

    def __init__(
        self,
        reads: str | float = "17.8 %",
        selector: Literal["ternary-sketch"] = "ternary-sketch",
        recovery: Literal["low-rank", "none"] = "low-rank",
        rank: Positive | None = None,
        group: Positive | None = None,
        rule: Literal["top-k", "token-top-k", "threshold"] = "top-k",
        unit: Literal["expert", "block"] = "expert",
        blocks: Positive = 8,
    ) -> None:
        if recovery == "none" and rank is not None:
            raise InputError(
                f"precision 'channels': a rank of {rank} without a recovery map",
                way_out="use `recovery: low-rank`, or leave the rank out",
            )
        self.reads = parse_percent(reads) if isinstance(reads, str) else Fraction(str(reads))
        self.rank = 0 if recovery == "none" else rank or RANK
        self.selector, self.group, self.rule = selector, group, rule
        self.blocks = blocks if unit == "block" else 1
        self.whole, self.draws = unit == "expert", unit == "block"
        self._costs: list[ChannelCost] = []
        self.kept: list[int] = []
        """How many channels a token keeps of an expert, per MoE layer: k of top-k."""

    def layout(self, expert_bytes: Sequence[int], geometry: Geometry) -> Layout:
        weights = geometry.expert_weights
        try:
            costs = {
                size: channel_cost(
                    geometry,
                    rank=self.rank,
                    group=self.group,
                    bytes_per_weight=Fraction(size, weights),
                )
                for size in set(expert_bytes)
            }
            self._costs = [costs[size] for size in expert_bytes]
            self.kept = [cost.kept(self.reads) for cost in self._costs]
        except InputError as error:
            raise InputError(
                error.problem, where="policy.precision", way_out=error.way_out
            ) from None
        channels = self._costs[0].channels
        self.assumption = (
            f"which channels matter is not in a trace: {self.kept[0]} of {channels} are drawn, "
            "uniformly and anew, for every token and expert; real tokens agree more than that, so "
            "that a batch reads less, and from fewer blocks"
        )
        if channels % self.blocks:
            raise InputError(
                f"{channels} channels have no {self.blocks} equal blocks",
                where="policy.precision",
                way_out="choose a number of `blocks` that divides them",
            )
        parts = [_equal(size, self.blocks) for size in expert_bytes]
        return Layout(parts, geometry.n_experts, blocks=not self.whole)

    def beside(self, geometry: Geometry) -> int:
        return geometry.n_experts * sum(c.sketch_bytes + c.recovery_bytes for c in self._costs)

    def start(self, context: Context) -> None:
        super().start(context)
        self._screened: LayerBatch | None = None
        self._mask = np.empty((0, 0), np.bool_)

    def needed(self, batch: LayerBatch) -> list[int]:
        if self.whole:
            return super().needed(batch)
        mask = self.channels(batch)
        entry, block = np.nonzero(mask.reshape(len(mask), self.blocks, -1).any(2))
        first = batch.layer * self.context.layout.layer_slices
        experts = np.array(batch.experts, np.int64)
        found: list[int] = (first + experts[entry] * self.blocks + block).tolist()
        return found

    def spared(self, batch: LayerBatch, used: Sequence[int]) -> int:
        layout, cost = self.context.layout, self._costs[batch.layer]
        computed = {layout.expert_of(s) for s in used}
        experts, channels = self._union(batch)
        read = sum(
            cost.read_bytes(n)
            for expert, n in zip(experts, channels, strict=True)
            if expert in computed or not (n or self.whole)  # of which not even a block is needed
        )
        return layout.layer_size(used) - read

    def _union(self, batch: LayerBatch) -> tuple[list[int], list[int]]:
        """Return the experts of *batch*, and how many channels any of its tokens keeps of each."""
        mask = self.channels(batch)
        if batch.n_tokens == 1:
            return batch.experts, mask.sum(1).tolist()
        experts = np.array(batch.experts, np.int64)
        order = experts.argsort(kind="stable")
        used, first = np.unique(experts[order], return_index=True)
        union = np.logical_or.reduceat(mask[order], first, axis=0) if len(used) else mask
        return used.tolist(), union.sum(1).tolist()

    def channels(self, batch: LayerBatch) -> Bools:
        """Return which channels each entry of *batch* keeps, (entries, channels); asks once."""
        if self._screened is not batch:
            self._screened = batch
            self._mask = self._drawn(batch) if batch.screen is None else batch.screen(batch)
        return self._mask

    def _drawn(self, batch: LayerBatch) -> Bools:
        k, channels, n = self.kept[batch.layer], self._costs[0].channels, len(batch.experts)
        if k in (0, channels):
            return np.full((n, channels), k > 0)
        found = np.zeros((n, channels), np.bool_)
        step = max(1, _DRAWN // channels)
        for start in range(0, n, step):
            part = found[start : start + step]
            chosen = self.context.rng.random(part.shape).argpartition(k - 1, 1)[:, :k]
            np.put_along_axis(part, chosen, True, 1)
        return found


def _equal(nbytes: int, parts: int) -> list[int]:
    """Return *nbytes* in as equal *parts* as whole bytes allow."""
    each, rest = divmod(nbytes, parts)
    return [each + (part < rest) for part in range(parts)]
