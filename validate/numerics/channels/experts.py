"""This module computes a layer's experts from the channels that a keep rule chooses.

It is the reference: plain torch, every matrix product dense, channels masked. What it says about
accuracy holds for any kernel that skips the reads; `kernel` is one that does.

Shapes: T tokens, K experts per token, A = T * K assignments (a token and one of its experts),
E experts, U experts used, P most assignments of one expert, H hidden, I channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moetier.traces.capture.find import MoeLayer
from moetier.traces.channels import ChannelCost, cost_of_sizes
from moetier.validate.numerics.channels.keep import Keep
from moetier.validate.numerics.channels.rotation import Rotation, rotation
from moetier.validate.numerics.channels.sketch import ChannelSettings, Sketch, make_sketch
from moetier.validate.numerics.experts import ExpertMatrices, stacked_matrices

CHUNK = 1 << 28  # bytes of unpacked matrices that are worked on at a time
RESIDENT = 1 << 28  # bytes up to which a layer's unpacked sketch is kept


class ChannelOutput(NamedTuple):
    """What `ChannelExperts.forward` returns."""

    out: Tensor  # (T, H), in the input's type
    kept: Tensor  # (T, K, I) bool: which channels were computed exactly


class _Chunk(NamedTuple):
    experts: Tensor  # (U)
    slots: Tensor  # (U, P): assignments, A where there is none


@dataclass(frozen=True, slots=True, eq=False)
class ChannelExperts:
    """A layer's experts with their sketch; `build` makes one."""

    matrices: ExpertMatrices  # (E, ...), the model's own
    sketch: Sketch
    settings: ChannelSettings
    rotation: Rotation
    estimator: Tensor | None  # (E, 2I, H): the unpacked sketch, where it is small

    @classmethod
    def build(
        cls,
        source: MoeLayer | ExpertMatrices,
        settings: ChannelSettings,
        sketch: Sketch | None = None,
    ) -> ChannelExperts:
        """Return the experts of *source* with their *sketch*, made here unless it is given.

        Raises:
            InputError: If no sketch can be made of them; see `make_sketch`.
        """
        if isinstance(source, MoeLayer):
            matrices, name = stacked_matrices(source), source.name
        else:
            matrices, name = source, ""
        sketch = sketch or make_sketch(matrices, settings, name)
        n_experts, n_channels, n_hidden = matrices.up.shape
        estimator = None
        if n_experts * 2 * n_channels * n_hidden * 4 <= RESIDENT:
            estimator = sketch.estimator(torch.arange(n_experts), n_hidden, settings.group)
        turn = rotation(n_hidden, settings.seed)
        return cls(matrices, sketch, settings, turn, estimator)

    def only(self, used: Tensor, matrices: ExpertMatrices) -> ChannelExperts:
        """Return the experts *used*, (U), with *matrices* (U, ...) in place of the model's own."""
        sketch = Sketch.of({name: value[used] for name, value in self.sketch.tensors().items()})
        estimator = None if self.estimator is None else self.estimator[used]
        return ChannelExperts(matrices, sketch, self.settings, self.rotation, estimator)

    def cost(self, bytes_per_weight: int | None = None) -> ChannelCost:
        """Return what an expert's channels cost to read, by default as the model stores them."""
        _, n_channels, n_hidden = self.matrices.up.shape
        return cost_of_sizes(
            n_hidden,
            n_channels,
            rank=self.settings.rank,
            group=self.settings.group,
            bytes_per_weight=bytes_per_weight or self.matrices.up.element_size(),
            biases=self.matrices.up_bias is not None,
        )

    @torch.no_grad()
    def forward(
        self, x: Tensor, ids: Tensor, weights: Tensor, keep: Keep, *, union: bool = False
    ) -> ChannelOutput:
        """Return the weighted sum of each token's experts, and the channels computed exactly.

        Args:
            x: Hidden states, (T, H).
            ids: Experts of each token, (T, K).
            weights: Their gate weights, (T, K).
            keep: The keep rule.
            union: Compute for every token what any token of the batch keeps of an expert: the
                reads are the same.
        """
        n_tokens, top_k = ids.shape
        m = self.matrices
        total = x.new_zeros(n_tokens + 1, x.shape[1], dtype=torch.float32)
        kept = torch.zeros(n_tokens * top_k + 1, m.up.shape[1], dtype=torch.bool)
        share = torch.nn.functional.pad(weights.float().flatten(), (0, 1))  # (A + 1)
        guesses, scores = self._screened(x, ids, weights)
        chosen = torch.nn.functional.pad(keep(scores).flatten(0, 1), (0, 0, 0, 1))  # (A + 1, I)
        for used, slots in self._chunks(ids):
            token = slots // top_k  # (U, P); T where there is no assignment
            guess, mask = guesses[slots], chosen[slots]  # (U, P, I)
            if union:
                mask = mask.any(1, keepdim=True).expand_as(mask)
            made = self._exact(x, used, token, mask) + self._recovered(guess, used, mask)
            if m.down_bias is not None:
                made = made + m.down_bias[used].unsqueeze(1)
            if m.post_norm is not None:
                made = m.post_norm(made.to(x.dtype)).float()
            # Chunks and rows ascend in expert id, so a token's experts are summed in that order.
            total.index_add_(0, token.flatten(), (made * share[slots].unsqueeze(-1)).flatten(0, 1))
            kept[slots.flatten()] = mask.flatten(0, 1)
        out = total[:n_tokens].to(x.dtype)
        return ChannelOutput(out, kept[:-1].view(n_tokens, top_k, m.up.shape[1]))

    @torch.no_grad()
    def scores(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return what a keep rule sees, (T, K, I): the size of a channel's part of the output.

        That is |gate weight| |estimated activation| |column of the down projection|.
        """
        return self._screened(x, ids, weights)[1]

    def _screened(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return estimated activations, (A + 1, I), the last row free, and scores, (T, K, I)."""
        rotated = self.rotation.apply(x)
        guesses = torch.zeros(ids.numel() + 1, self.matrices.up.shape[1])
        for used, slots in self._chunks(ids):
            guess = self._screen(rotated, used, slots // ids.shape[1])
            guesses[slots.flatten()] = guess.flatten(0, 1)
        shown = guesses[:-1].view(*ids.shape, guesses.shape[1])
        scores = shown.abs() * self.sketch.norms[ids].float()
        return guesses, scores * weights.float().abs().unsqueeze(-1)

    def _chunks(self, ids: Tensor) -> Iterator[_Chunk]:
        """Yield the experts used in ascending id, some at a time, with their assignments."""
        flat = ids.flatten()
        used, which, counts = torch.unique(flat, return_inverse=True, return_counts=True)
        order = which.argsort(stable=True)
        rank = torch.arange(len(flat)) - (counts.cumsum(0) - counts)[which[order]]
        slots = torch.full((len(used), int(counts.max()) if len(flat) else 0), len(flat))
        slots[which[order], rank] = order
        step = max(1, CHUNK // (3 * 4 * self.matrices.up[0].numel()))
        for start in range(0, len(used), step):
            part = slice(start, start + step)
            yield _Chunk(used[part], slots[part, : int(counts[part].max())])

    def _screen(self, rotated: Tensor, used: Tensor, token: Tensor) -> Tensor:
        """Return the activations that the sketch makes of *token*, (U, P), as (U, P, I)."""
        if self.estimator is not None:
            sketch = self.estimator[used]
        else:
            sketch = self.sketch.estimator(used, rotated.shape[1], self.settings.group)
        both = torch.bmm(_rows(rotated, token), sketch.mT)
        gate, up = both.chunk(2, -1)
        m = self.matrices
        return m.activation(
            _biased(gate, m.gate_bias, used).float(), _biased(up, m.up_bias, used).float()
        )

    def _exact(self, x: Tensor, used: Tensor, token: Tensor, mask: Tensor) -> Tensor:
        """Return what the channels in *mask* contribute, (U, P, H), in float32."""
        m = self.matrices
        assert m.gate is not None  # `make_sketch` refuses experts without one
        rows = _rows(x.to(m.up.dtype), token)
        gate = _biased(torch.bmm(rows, m.gate[used].mT), m.gate_bias, used)
        up = _biased(torch.bmm(rows, m.up[used].mT), m.up_bias, used)
        act = m.activation(gate, up) * mask
        return torch.bmm(act, m.down[used].mT).float()

    def _recovered(self, guess: Tensor, used: Tensor, mask: Tensor) -> Tensor:
        """Return what the maps make of the channels outside *mask*, (U, P, H)."""
        skipped = torch.bmm(guess * ~mask, self.sketch.right[used].float())
        return torch.bmm(skipped, self.sketch.left[used].float().mT)


def _rows(x: Tensor, token: Tensor) -> Tensor:
    """Return the rows of *x*, (T, H), of *token*, (U, P), as (U, P, H); zeros for row T."""
    return torch.nn.functional.pad(x, (0, 0, 0, 1))[token]


def _biased(value: Tensor, bias: Tensor | None, used: Tensor) -> Tensor:
    return value if bias is None else value + bias[used].unsqueeze(1)
