"""This module reads from a capture with hidden states what predictors learn from.

Shapes: N tokens over the whole capture, H hidden, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from moetier.traces.batch import LayerBatch
from moetier.traces.capture.fingerprint import fingerprint
from moetier.traces.capture.hidden import read_hidden
from moetier.traces.capture.run import capture
from moetier.traces.errors import InputError
from moetier.traces.io import TraceReader
from moetier.traces.predictors.base import View
from moetier.traces.predictors.learn.parts import ModelParts


@dataclass(frozen=True, slots=True, eq=False)
class LayerSamples:
    """What one MoE layer read and did, token by token."""

    residual: Tensor  # (N, H) in the model's type
    router_input: Tensor  # (N, H)
    ids: Tensor  # (N, K)
    weights: Tensor  # (N, K) float32

    def take(self, rows: Tensor) -> LayerSamples:
        """Return the tokens *rows*."""
        return LayerSamples(
            self.residual[rows], self.router_input[rows], self.ids[rows], self.weights[rows]
        )

    def view(self, layer: int, parts: ModelParts, rows: Tensor | slice = slice(None)) -> View:
        """Return what a predictor sees of *rows* at *layer*, which this is."""
        device = parts.device(layer)
        return View(
            layer,
            self.residual[rows].to(device),
            self.router_input[rows].to(device),
            self.ids[rows].to(device),
            self.weights[rows].to(device),
            parts,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """The same N tokens at every MoE layer, with the prompt each belongs to."""

    layers: list[LayerSamples]
    prompt: Tensor  # (N,) number of the prompt

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.prompt)

    def take(self, rows: Tensor) -> Samples:
        """Return the tokens *rows*, numbers or a mask."""
        return Samples([layer.take(rows) for layer in self.layers], self.prompt[rows])

    def view(self, layer: int, parts: ModelParts, rows: Tensor | slice = slice(None)) -> View:
        """Return what a predictor sees of *rows* at *layer*."""
        return self.layers[layer].view(layer, parts, rows)


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Tokens by the prompt they belong to; no prompt is in two parts."""

    train: Samples
    validation: Samples  # for early stopping
    held_out: Samples  # for the report
    prompts: tuple[int, int, int]


def from_trace(trace: str | Path, parts: ModelParts) -> Samples:
    """Return the samples of a capture of this model with `--hidden`.

    Raises `InputError` where the trace lacks hidden states or residuals, or is of another model.
    """
    collected: list[list[LayerSamples]] = [[] for _ in range(parts.n_layers)]
    prompts: list[int] = []
    for batch, layer in batch_samples(trace, parts):
        collected[batch.layer].append(layer)
        if batch.layer == 0:
            prompts += batch.requests or [0] * batch.n_tokens
    layers = [
        LayerSamples(
            torch.cat([part.residual for part in found]),
            torch.cat([part.router_input for part in found]),
            torch.cat([part.ids for part in found]),
            torch.cat([part.weights for part in found]),
        )
        for found in collected
    ]
    return Samples(layers, torch.tensor(prompts))


def batch_samples(
    trace: str | Path, parts: ModelParts
) -> Iterator[tuple[LayerBatch, LayerSamples]]:
    """Yield every batch of *trace*, captured with `--hidden`, with what its layer read.

    Raises `InputError` as `from_trace` does.
    """
    reader = TraceReader(trace)
    captured = reader.header.provenance.model_fingerprint
    mine = fingerprint(parts.model)
    if captured != mine:
        raise InputError(
            f"captured from a model with fingerprint {str(captured)[:12]}, this one has "
            f"{mine[:12]}",
            where=trace,
            way_out="take a capture of the same model",
        )
    for batch, hidden in zip(reader.batches(), _present(trace), strict=True):
        if (batch.step, batch.layer) != (hidden.step, hidden.moe_layer):
            raise InputError("hidden states of another capture", where=trace, way_out="redo it")
        if hidden.residual is None:
            raise InputError(
                "no residuals beside the trace", where=trace, way_out="capture with --hidden again"
            )
        if batch.weights is None or batch.tokens is not None:
            raise InputError("weights or experts are missing", where=trace, way_out="redo it")
        shape = (batch.n_tokens, -1)
        yield (
            batch,
            LayerSamples(
                hidden.residual,
                hidden.hidden,
                torch.tensor(batch.experts).view(shape),
                torch.from_numpy(batch.weights.copy()).view(shape),
            ),
        )


def from_prompts(
    parts: ModelParts,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    batch_size: int,
    seed: int,
    progress: Any = None,
) -> Samples:
    """Return the samples of *prompts*, each once, and of what the model generates from them."""
    with TemporaryDirectory() as folder:
        trace = capture(
            parts.model,
            tokenizer,
            list(dict.fromkeys(prompts)),
            Path(folder) / "samples.parquet",
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            hidden=True,
            seed=seed,
            progress=progress,
        )
        return from_trace(trace, parts)


def split(samples: Samples, *, held_out: float, validation: float, seed: int) -> Split:
    """Return *samples* in three parts by prompt; shares are of all prompts, at least one each.

    Raises `InputError` for fewer than three prompts, or shares that leave none to train on.
    """
    prompts = torch.unique(samples.prompt)
    n = len(prompts)
    away = [max(1, round(share * n)) for share in (held_out, validation)]
    if sum(away) >= n:
        raise InputError(
            f"{n} prompts cannot be split: {away[0]} held out and {away[1]} for validation "
            "leave none to train on",
            way_out="give more prompts",
        )
    order = prompts[torch.randperm(n, generator=torch.Generator().manual_seed(seed))]
    test, valid, train = order.tensor_split([away[0], sum(away)])

    def of(part: Tensor) -> Samples:
        return samples.take(torch.isin(samples.prompt, part))

    return Split(of(train), of(valid), of(test), (len(train), len(valid), len(test)))


def _present(trace: str | Path) -> Any:
    """Yield the hidden batches that have tokens, as a trace has no batch without one."""
    return (hidden for hidden in read_hidden(trace) if len(hidden.hidden))
