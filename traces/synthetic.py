"""This module makes routing up: skewed, with memory in time and across layers, or without either.

A router is imitated by noise: expert e of a layer has the score `log p(e) + Gumbel noise`, and the
k largest scores are a draw of k experts without replacement with chances p (the Gumbel top-k trick,
Kool et al., arXiv 1903.06059). p follows Zipf's law over a random order of the experts, another one
in each layer. Time enters as experts kept from the token before, layers as shared noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moetier.traces.batch import DECODE, PREFILL, LayerBatch
from moetier.traces.batching import batches_of
from moetier.traces.columns import Columns, ColumnSource, build, concat
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.traces.io import ArrayTrace, write_trace
from moetier.traces.schema import Header, Provenance

CHUNK_SCORES = 1 << 21
"""Scores made at a time (float32): 8 MiB, whatever the length of the trace."""


class Synthetic:
    """Routing of *requests* requests in lockstep: a *prompt* each, then *tokens* decoded tokens.

    The prompts of all requests are one forward step (none if *prompt* is 0); then each step decodes
    one token per request. The same arguments give the same rows, every time.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        prompt: int = 0,
        tokens: int = 128,
        requests: int = 1,
        skew: float = 1.0,
        reuse: float = 0.3,
        layer_correlation: float = 0.0,
        context: int = 0,
        seed: int = 0,
        scores: bool = False,
    ) -> None:
        """Describe the routing; nothing is drawn yet.

        Args:
            geometry: The model; only experts, top-k and MoE layers matter to the routing.
            prompt: Prompt tokens of each request.
            tokens: Decoded tokens of each request.
            requests: Requests that run in lockstep.
            skew: Zipf exponent of the popularity of experts; 0 makes all equally popular.
            reuse: Probability that an expert of a request's previous token is kept, each on its
                own, before the rest is drawn; chance adds to it. 0: no memory.
            layer_correlation: Probability that an expert's noise is that of the expert of the same
                popularity rank in the layer before; it does not change popularity.
            context: Tokens of each request that came before and are not simulated; their keys and
                values are there, as after a long prompt.
            seed: Of the random numbers.
            scores: Also give the scores, as logits.

        Raises:
            InputError: If a number is out of range.
        """
        whole = {"prompt": prompt, "tokens": tokens, "context": context}
        for name, value in whole.items():
            if value < 0:
                raise InputError(f"{name} is {value}", where="synthetic", way_out="at least 0")
        for name, share in {"reuse": reuse, "layer_correlation": layer_correlation}.items():
            if not 0 <= share <= 1:
                raise InputError(f"{name} is {share}", where="synthetic", way_out="0 to 1")
        if requests < 1:
            raise InputError(f"requests is {requests}", where="synthetic", way_out="at least 1")
        if skew < 0 or not np.isfinite(skew):
            raise InputError(f"skew is {skew}", where="synthetic", way_out="at least 0")
        if prompt + tokens == 0:
            raise InputError("prompt and tokens are both 0", where="synthetic")
        self.geometry, self.prompt, self.tokens, self.requests = geometry, prompt, tokens, requests
        self.skew, self.reuse, self.layer_correlation = skew, reuse, layer_correlation
        self.context, self.seed, self.scores = context, seed, scores
        self.header = Header(
            geometry=geometry,
            score_kind="logits" if scores else "none",
            provenance=Provenance(
                kind="synthetic",
                model=geometry.name,
                seed=seed,
                note=f"prompt {prompt}, tokens {tokens}, requests {requests}, skew {skew}, "
                f"reuse {reuse}, layer_correlation {layer_correlation}, context {context}",
            ),
        )

    def batches(self) -> Iterator[LayerBatch]:
        """Yield the batches in forward order. Can be called again."""
        return batches_of(self.columns())

    def write(self, path: str | Path) -> Path:
        """Write the rows to *path*, chunk by chunk."""
        return write_trace(self, path)

    def columns(self) -> Iterator[Columns]:
        """Yield the rows in chunks of arrays. Can be called again."""
        draw = _Draw(self)
        prefill = [self._rows(draw.tokens(n), at) for at, n in self._chunks(0, self.prompt)]
        if prefill:
            # one step holds all prompt tokens: layer by layer, in each request by request
            rows = concat(prefill)
            yield rows.take(np.lexsort((rows.position, rows.request, rows.moe_layer)))
        for at, n in self._chunks(self.prompt, self.prompt + self.tokens):
            yield self._rows(draw.tokens(n), at)

    def _chunks(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the first position and the length of every chunk of *start* to *end*."""
        geometry = self.geometry
        width = self.requests * geometry.n_moe_layers * geometry.n_experts
        size = max(1, CHUNK_SCORES // width)
        for at in range(start, end, size):
            yield at, min(size, end - at)

    def _rows(self, drawn: tuple[Any, Any, Any], at: int) -> Columns:
        """Return rows of n tokens from position *at*; drawn are (n, requests, layers, k or E)."""
        experts, weights, scores = drawn
        n, requests, layers, _ = experts.shape
        prefill = at < self.prompt
        first = (1 if self.prompt else 0) - self.prompt  # step of position 0, were it decoded
        position = np.repeat(np.arange(at, at + n), layers * requests)
        return build(
            self.header,
            request=np.tile(np.arange(requests), n * layers),
            phase=PREFILL if prefill else DECODE,
            step=0 if prefill else position + first,
            position=position + self.context,
            moe_layer=np.tile(np.repeat(np.arange(layers), requests), n),
            experts=_by_layer(experts),
            weights=_by_layer(weights),
            scores=None if scores is None else _by_layer(scores),
        )


def _by_layer(drawn: Any) -> Any:
    """Return (n, R, L, k) as rows (n * L * R, k): by token, then by layer, then by request."""
    return drawn.swapaxes(1, 2).reshape(-1, drawn.shape[-1])


class _Draw:
    """The state of one pass: the random numbers, and each request's previous experts."""

    def __init__(self, spec: Synthetic) -> None:
        self.spec = spec
        self.random = np.random.Generator(np.random.PCG64(spec.seed))
        geometry = spec.geometry
        layers, n_experts = geometry.n_moe_layers, geometry.n_experts
        chance = np.arange(1, n_experts + 1, dtype=np.float64) ** -spec.skew
        self.log_chance = np.log(chance / chance.sum()).astype(np.float32)
        orders = [self.random.permutation(n_experts) for _ in range(layers)]
        self.rank = np.argsort(orders, axis=1)  # (L, E): the rank of each expert
        self.previous: Any = None  # (R, L, k)

    def tokens(self, n: int) -> tuple[Any, Any, Any]:
        """Draw *n* tokens per request.

        Returns:
            experts (n, R, L, k) int16, by descending score; weights (n, R, L, k), descending: the
            scores' softmax over the chosen experts, over all where the model's router does not
            renormalise; scores (n, R, L, E) or None.
        """
        k = self.spec.geometry.top_k
        scores = self._scores(n)
        if self.spec.reuse:
            ids = self._keep(scores)
        else:
            ids = np.argpartition(-scores, k - 1, axis=-1)[..., :k]
        chosen = np.take_along_axis(scores, ids, axis=-1)
        order = np.argsort(-chosen, axis=-1, kind="stable")
        ids = np.take_along_axis(ids, order, axis=-1)
        chosen = np.take_along_axis(chosen, order, axis=-1)
        weights = np.exp(chosen - chosen[..., :1])
        whole = weights
        if self.spec.geometry.norm_topk is False:
            whole = np.exp(scores - chosen[..., :1])
        weights = weights / whole.sum(axis=-1, keepdims=True)
        return ids.astype(np.int16), weights, scores if self.spec.scores else None

    def _scores(self, n: int) -> Any:
        """Return (n, R, L, E) float32 scores of fresh tokens."""
        spec, geometry = self.spec, self.spec.geometry
        layers, n_experts = geometry.n_moe_layers, geometry.n_experts
        shape = (n, spec.requests, layers, n_experts)
        noise = self.random.standard_exponential(shape, np.float32)
        np.maximum(noise, np.finfo(np.float32).tiny, out=noise)  # one draw in some million is 0
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
        if spec.layer_correlation:
            shared = self.random.random(shape, np.float32) < spec.layer_correlation
            for layer in range(1, layers):
                here, before = noise[:, :, layer], noise[:, :, layer - 1]
                np.copyto(here, before, where=shared[:, :, layer])
        noise += self.log_chance  # by rank up to here
        rank = np.broadcast_to(self.rank, shape)
        scores: Any = np.take_along_axis(noise, rank, axis=-1)
        return scores

    def _keep(self, scores: Any) -> Any:
        """Return the experts (n, R, L, k) token by token; *scores* of kept experts rise to the top.

        A kept expert's score becomes the largest fresh one plus up to 1: above what is drawn, and
        of the same scale.
        """
        k, reuse = self.spec.geometry.top_k, self.spec.reuse
        shape = (*scores.shape[:3], k)
        kept = self.random.random(shape, np.float32) < reuse
        lift = scores.max(axis=-1, keepdims=True) + self.random.random(shape, np.float32)
        ids = np.empty(shape, np.int64)
        previous = self.previous
        for token in range(len(scores)):
            row = scores[token]
            if previous is not None:
                old = np.take_along_axis(row, previous, axis=-1)
                new = np.where(kept[token], lift[token], old)
                np.put_along_axis(row, previous, new, axis=-1)
            previous = np.argpartition(-row, k - 1, axis=-1)[..., :k]
            ids[token] = previous
        self.previous = previous
        return ids


def shuffled(source: ColumnSource, seed: int = 0) -> ArrayTrace:
    """Return *source* with its tokens in random order, in memory: a control without memory in time.

    Prefill and decode tokens are permuted apart. What is asked how often stays, also which experts
    of different layers go together; what follows what does not. What a device did (`recorded`) is
    dropped, as it depends on the order.
    """
    rows = concat(list(source.columns()))
    random = np.random.Generator(np.random.PCG64(seed))
    keys = np.stack([rows.phase, rows.step, rows.request, rows.position], axis=1).astype(np.int64)
    _, token = np.unique(keys, axis=0, return_inverse=True)
    token = token.reshape(-1)
    lot = random.permutation(int(token.max()) + 1)[token]
    group = rows.moe_layer.astype(np.int64) * 2 + rows.phase
    here = np.lexsort((token, group))
    there = np.lexsort((lot, group))
    moved = np.empty(len(rows), np.int64)
    moved[here] = there
    content = rows.take(moved)
    content.step, content.position, content.request = rows.step, rows.position, rows.request
    content.recorded = None
    provenance = source.header.provenance.model_copy(
        update={"kind": "synthetic", "seed": seed, "note": "the tokens of a trace, shuffled"}
    )
    header = source.header.model_copy(
        update={"recorded_residency": False, "provenance": provenance}
    )
    return ArrayTrace(header, [content])
