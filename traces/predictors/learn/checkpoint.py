"""This module keeps predictors as safetensors files whose header says what they are for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from moetier.traces.capture.fingerprint import checksum, fingerprint
from moetier.traces.errors import InputError
from moetier.traces.files import replacing
from moetier.traces.geometry import Geometry
from moetier.traces.predictors import PREDICTORS, create
from moetier.traces.predictors.base import Predictor

KEY = "moetier"
VERSION = 2


class About(BaseModel):
    """The header of a checkpoint: everything about a predictor but its weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = VERSION
    kind: str
    arguments: dict[str, Any]
    model: str  # the name of the model it was trained on
    model_fingerprint: str
    geometry: Geometry
    seed: int
    versions: dict[str, str] = Field(default_factory=dict)
    metrics: dict[str, Any] = Field(default_factory=dict)  # on the held-out prompts
    digest: str = ""  # sha256 of the tensors and of this header without it


def save_predictor(
    predictor: Predictor,
    path: str | Path,
    *,
    model: Any,
    geometry: Geometry,
    seed: int,
    metrics: dict[str, Any],
) -> About:
    """Write *predictor*, trained on *model*, to *path*, and return its header."""
    about = About(
        kind=predictor.kind,
        arguments=dict(predictor.arguments),
        model=geometry.name,
        model_fingerprint=fingerprint(model),
        geometry=geometry,
        seed=seed,
        versions={"moetier": version("moetier"), "torch": torch.__version__},
        metrics=metrics,
    )
    about = about.model_copy(update={"digest": _digest(about, predictor.tensors)})
    with replacing(path) as temporary:
        save_file(predictor.tensors, temporary, metadata={KEY: about.model_dump_json()})
    return about


def read_about(path: str | Path) -> About:
    """Return the header of the checkpoint at *path*; raise `InputError` for any other file."""
    if not Path(path).is_file():
        raise InputError("no such file", where=path, way_out="name a predictor (.safetensors)")
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(KEY)
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"not a predictor: {error}", where=path, way_out="`moetier train-predictor` makes one"
        ) from None
    if text is None:
        raise InputError(
            "safetensors, but not a predictor: its metadata has no 'moetier' header",
            where=path,
            way_out="`moetier train-predictor` makes one",
        )
    try:
        about = About.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise InputError(f"header, key '{key}': {first['msg']}", where=path) from None
    if about.version != VERSION:
        raise InputError(
            f"predictor version {about.version}, this moetier reads {VERSION}",
            where=path,
            way_out="train it again",
        )
    return about


def load_predictor(path: str | Path, model: Any) -> Predictor:
    """Return the predictor at *path* for *model*.

    Raises `InputError` when it was trained on another, naming both models, or is damaged.
    """
    about = read_about(path)
    tensors = load_file(path)
    if _digest(about, tensors) != about.digest:
        raise InputError(
            "is damaged: its digest differs", where=path, way_out="copy or train it again"
        )
    mine = fingerprint(model)
    if mine != about.model_fingerprint:
        raise InputError(
            f"predictor '{about.kind}' was trained on {about.model} "
            f"({about.model_fingerprint[:12]}), not on this {type(model).__name__} ({mine[:12]})",
            where=path,
            way_out="train it on this model",
        )
    predictor = create({"kind": about.kind, **about.arguments}, where=str(path))
    predictor.tensors = tensors
    return predictor


def _digest(about: About, tensors: Mapping[str, Tensor]) -> str:
    lines = [about.model_dump_json(exclude={"digest"})]
    lines += [f"{name} {checksum(tensors[name])}" for name in sorted(tensors)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def find_predictor(text: str, model: Any) -> Predictor:
    """Return the predictor *text* for *model*: a checkpoint, or a kind that needs no training."""
    if Path(text).suffix == ".safetensors" or Path(text).is_file():
        return load_predictor(text, model)
    if text not in PREDICTORS.names():
        raise InputError(
            f"unknown predictor '{text}'",
            way_out="name a checkpoint (.safetensors) or a kind of `moetier list predictors`",
        )
    return create(text)
