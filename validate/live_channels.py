"""This module lets a running model's experts be computed from the channels that matter.

A policy asks, batch by batch, which channels its tokens keep (`LayerBatch.screen`); the layer then
computes exactly these, and what is skipped by its low-rank map. The numbers are those of
`numerics.channels`, in plain torch on the CPU: what it says of accuracy and of bytes read holds for
any kernel, its own time says nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moetier.sim.policy.base import Precision
from moetier.sim.policy.precision.channels import Channels
from moetier.traces.batch import Bools, LayerBatch
from moetier.traces.capture.find import MoeLayer
from moetier.traces.capture.fingerprint import fingerprint
from moetier.traces.capture.hook import ExpertsCall, arguments, attach
from moetier.traces.errors import InputError
from moetier.validate.numerics.channels.experts import ChannelExperts
from moetier.validate.numerics.channels.keep import Keep, TokenTopK, TopK, calibrated
from moetier.validate.numerics.channels.sketch import ChannelSettings
from moetier.validate.numerics.channels.stored import load_sketches, store_sketches

Progress = Callable[[int, int], None]


class ChannelReader:
    """One layer's experts, computed from the channels that were said to be kept."""

    def __init__(self, channels: ChannelExperts, keep: Keep) -> None:
        """Keep by the rule *keep*."""
        self.channels, self.keep = channels, keep
        self._keys = np.empty(0, np.int64)  # row * E + expert, ascending
        self._kept = torch.empty(0)  # (len(_keys), I) bool

    def screen(self, call: ExpertsCall, valid: Tensor, batch: LayerBatch) -> Bools:
        """Return what each entry of *batch* keeps, (entries, I), and compute so when it comes."""
        if batch.tokens is not None or batch.weights is None:
            raise InputError(
                f"the tokens of layer {batch.layer} have unequally many experts, or no weights",
                where="policy.precision",
                way_out="use channels with a routing that gives every token as many",
            )
        ids = torch.tensor(batch.experts).view(batch.n_tokens, -1)
        weights = torch.from_numpy(np.array(batch.weights)).view(ids.shape)
        hidden = call.hidden.detach()[valid]
        kept = self.keep(self.channels.scores(hidden, ids, weights)).flatten(0, 1)
        keys = self._of(valid.unsqueeze(1), ids)
        order = keys.argsort()
        self._keys, self._kept = keys[order], kept[torch.from_numpy(order)]
        mask: Bools = kept.numpy()
        return mask

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the experts as `screen` said, (T, H); rows that nobody asked about keep none."""
        hidden, ids, weights = arguments(args, kwargs)
        return self.compute(self.channels, hidden, ids, weights, self.mask(ids))

    def compute(
        self, channels: ChannelExperts, hidden: Tensor, ids: Tensor, weights: Tensor, kept: Tensor
    ) -> Tensor:
        """Compute experts of *channels* from what is *kept*, and forget what was screened."""
        made = channels.forward(hidden, ids, weights, lambda scores: kept)
        self._keys = self._keys[:0]
        return made.out

    def mask(self, ids: Tensor) -> Tensor:
        """Return what `screen` kept for *ids*, (T, K), as (T, K, I)."""
        wanted = self._of(torch.arange(len(ids)).unsqueeze(1), ids)
        n_channels = self.channels.matrices.up.shape[1]
        found = torch.zeros(len(wanted), n_channels, dtype=torch.bool)
        if len(self._keys):
            at = np.minimum(self._keys.searchsorted(wanted), len(self._keys) - 1)
            known = torch.from_numpy(self._keys[at] == wanted)
            found[known] = self._kept[torch.from_numpy(at)[known]]
        return found.view(*ids.shape, n_channels)

    def _of(self, rows: Tensor, ids: Tensor) -> Any:
        """Return a number for each pair of a row and one of its experts."""
        return (rows * len(self.channels.matrices.up) + ids).flatten().numpy()


class ChannelReaders:
    """The readers of a model's MoE layers; see `traces.live.LiveScreen`."""

    def __init__(self, readers: Sequence[ChannelReader]) -> None:
        """Take one reader per MoE layer."""
        self.readers = readers

    def screen(self, call: ExpertsCall, valid: Tensor, batch: LayerBatch) -> Bools:
        """Ask the reader of the layer that *call* is about to compute."""
        return self.readers[call.moe_layer].screen(call, valid, batch)


@contextmanager
def reading_channels(
    model: Any,
    layers: Sequence[MoeLayer],
    precision: Precision,
    calibration: Sequence[Sequence[int]] = (),
    *,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Iterator[ChannelReaders | None]:
    """Let the experts of *layers* of *model* read channels until the block ends.

    Args:
        model: Stays as it was, bit for bit.
        layers: All of its MoE layers.
        precision: One other than `Channels` changes nothing, and there are no readers.
        calibration: Token ids of texts that thresholds are calibrated on.
        folder: Where sketches are kept between processes.
        progress: Told (layers done, layers in all) while sketches are made.

    Raises:
        InputError: If a layer has experts that cannot be read so, or a threshold has no texts.
    """
    if not isinstance(precision, Channels):
        yield None
        return
    if precision.rule == "threshold" and not calibration:
        raise InputError(
            "a threshold is calibrated on other texts than those asked about, and there are none",
            where="policy.precision.rule",
            way_out="use `rule: top-k`, or ask moe-tiny's own tasks",
        )
    channels = sketched(model, layers, settings_of(precision), folder, progress)
    keeps = _keeps(model, channels, precision, calibration)
    readers = [ChannelReader(*pair) for pair in zip(channels, keeps, strict=True)]
    with ExitStack() as stack:
        for where, reader in zip(layers, readers, strict=True):
            experts: Any = where.experts
            stack.callback(experts.__dict__.pop, "forward", None)
            experts.forward = reader.forward
        yield ChannelReaders(readers)


def settings_of(precision: Channels) -> ChannelSettings:
    """Return how the sketches of *precision* are made."""
    return ChannelSettings(rank=precision.rank, group=precision.group)


def sketched(
    model: Any,
    layers: Sequence[MoeLayer],
    settings: ChannelSettings,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> list[ChannelExperts]:
    """Return the experts of *layers* with their sketches, made once per checkpoint and *folder*.

    A file there that is damaged is made again.

    Raises `InputError` as `make_sketch` does, for a model that is not on the CPU, and for a
    *folder* that cannot be made.
    """
    if model.device.type != "cpu":
        raise InputError(
            f"the channel reader computes on the CPU, and the model is on {model.device}",
            where="policy.precision",
            way_out="load the model on the CPU",
        )
    if folder is None:
        found = []
        for done, where in enumerate(layers, start=1):
            found.append(ChannelExperts.build(where, settings))
            if progress is not None:
                progress(done, len(layers))
        return found
    told = json.dumps([fingerprint(model), settings.as_dict()], sort_keys=True)
    path = folder / f"channels-{hashlib.sha256(told.encode()).hexdigest()[:24]}.safetensors"
    if path.is_file():
        with suppress(InputError):
            return load_sketches(model, path, settings, layers)
    else:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"sketches cannot be kept here: {error.strerror}",
                where=folder,
                way_out="name a folder that can be written",
            ) from None
    store_sketches(model, path, settings, progress=progress)
    return load_sketches(model, path, settings, layers)


def _keeps(
    model: Any,
    channels: Sequence[ChannelExperts],
    precision: Channels,
    calibration: Sequence[Sequence[int]],
) -> list[Keep]:
    """Return the keep rule of each layer."""
    if precision.rule == "threshold":
        scores = _scores(model, channels, calibration)
        return [calibrated(parts, k) for parts, k in zip(scores, precision.kept, strict=True)]
    rule = TopK if precision.rule == "top-k" else TokenTopK
    return [rule(k) for k in precision.kept]


def _scores(
    model: Any, channels: Sequence[ChannelExperts], texts: Sequence[Sequence[int]]
) -> list[list[Tensor]]:
    """Return the channels' scores, (T, K, I) per text, that each layer sees in *texts*."""
    found: list[list[Tensor]] = [[] for _ in channels]

    def observe(call: ExpertsCall) -> None:
        layer = channels[call.moe_layer]
        found[call.moe_layer].append(layer.scores(call.hidden, call.ids, call.weights))

    with attach(model, observe), torch.no_grad():
        for ids in texts:
            model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    return found
