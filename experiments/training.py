"""This module trains a predictor as a YAML file says."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moetier.experiments.config import read_mapping
from moetier.experiments.files import find_file, inside
from moetier.sim.yaml_input import check
from moetier.traces.errors import InputError
from moetier.traces.predictors import create

Progress = Callable[[int, int], None]
"""Called with (done, in all): prompts first, then epochs."""


class TrainConfig(BaseModel):
    """One training: a model, what it reads, a predictor, and where that is written."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str  # a checkpoint folder, or the id of a model on the hub
    prompts: str | None = None  # a file of prompts, from which the model generates
    trace: str | None = None  # or what `capture --hidden` wrote
    predictor: str | dict[str, Any]
    out: str  # the checkpoint to write (.safetensors)
    seed: int = Field(default=0, ge=0)
    epochs: int = Field(default=30, ge=1)
    patience: int = Field(default=3, ge=1)
    batch: int = Field(default=256, ge=1)  # tokens a step
    learning_rate: float = Field(default=1e-3, gt=0)
    held_out: float = Field(default=0.2, gt=0, lt=1)  # share of the prompts
    validation: float = Field(default=0.1, gt=0, lt=1)
    max_new_tokens: int = Field(default=32, ge=1)
    batch_size: int = Field(default=8, ge=1)  # prompts that run together
    device_map: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> TrainConfig:
        if (self.prompts is None) == (self.trace is None):
            raise ValueError("expected either prompts or a trace to learn from")
        if not self.out.endswith(".safetensors"):
            raise ValueError(f"out: expected a name that ends in .safetensors, got {self.out!r}")
        return self


def load_training(path: str | Path, overrides: list[str] | None = None) -> TrainConfig:
    """Return the training that the YAML file *path* describes; raise `InputError` if it cannot."""
    config = check(TrainConfig, read_mapping(path, overrides), path)
    with inside(path):
        create(config.predictor, "predictor")
        for key in ("prompts", "trace"):
            if (file := getattr(config, key)) is not None:
                with inside(key):
                    find_file(file)
        if not Path(config.out).parent.is_dir():
            raise InputError("its folder does not exist", where="out", way_out="make it")
    return config


def train_from(config: TrainConfig, where: str, progress: Progress | None = None) -> dict[str, Any]:
    """Train as *config* says, write the checkpoint and return what it reaches."""
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise InputError(
                f"training needs {package}, which is not installed",
                way_out="`pip install moetier[models]`",
            )
    from moetier.traces.capture.load import load_model
    from moetier.traces.capture.prompts import read_prompts
    from moetier.traces.predictors.learn.checkpoint import save_predictor
    from moetier.traces.predictors.learn.evaluate import summary
    from moetier.traces.predictors.learn.parts import find_parts
    from moetier.traces.predictors.learn.samples import from_prompts, from_trace, split
    from moetier.traces.predictors.learn.train import Settings, train

    with inside(where):
        predictor = create(config.predictor, "predictor")
        model, tokenizer = load_model(_model_path(config.model), config.device_map)
        parts = find_parts(model)
        if config.trace is not None:
            samples = from_trace(find_file(config.trace), parts)
        else:
            assert config.prompts is not None
            samples = from_prompts(
                parts, tokenizer, read_prompts(find_file(config.prompts)),
                max_new_tokens=config.max_new_tokens, batch_size=config.batch_size,
                seed=config.seed, progress=progress,
            )  # fmt: skip
        tokens = split(
            samples, held_out=config.held_out, validation=config.validation, seed=config.seed
        )
        settings = Settings(
            config.epochs, config.patience, config.batch, config.learning_rate, config.seed
        )
        trained = train(predictor, tokens, parts, settings, progress)
        layers = [asdict(item) for item in trained.held_out]
        means = summary(trained.held_out)
        about = save_predictor(
            trained.predictor, config.out,
            model=model, geometry=parts.geometry, seed=config.seed,
            metrics={"layers": layers, "means": means},
        )  # fmt: skip
    entries = trained.predictor.entries(parts.geometry)
    return {
        "predictor": {"kind": about.kind, **about.arguments},
        "model": about.model,
        "model_fingerprint": about.model_fingerprint,
        "seed": about.seed,
        "n_parameters": trained.predictor.n_parameters(parts.geometry),
        "costs": [entry.model_dump() for entry in entries],
        "epochs": max(len(trained.losses) - 1, 0),
        "losses": trained.losses,
        "prompts": dict(zip(("train", "validation", "held_out"), tokens.prompts, strict=True)),
        "n_tokens": len(tokens.held_out),
        "layers": layers,
        "means": means,
        "out": config.out,
    }


def _model_path(text: str) -> str:
    """Return the folder *text*, from here or among the package's own files, or a model id."""
    try:
        return str(find_file(text))
    except InputError:
        return text
