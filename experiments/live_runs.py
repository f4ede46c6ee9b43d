"""This module performs a run inside a live model; torch loads only when one is performed."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetier.experiments.config import MachineConfig, RunConfig, load_hardware
from moetier.experiments.files import find_file, inside
from moetier.experiments.runs import Digest, outcome, setting_of
from moetier.experiments.sources import open_trace_file
from moetier.sim.records import OnColumns, RecordWriter
from moetier.traces.errors import InputError
from moetier.traces.predictors import create
from moetier.traces.predictors.base import Predictor
from moetier.traces.samples import moe_tiny_path

if TYPE_CHECKING:
    from moetier.validate.evaluate import Loaded
    from moetier.validate.evaluate_questions import Question
    from moetier.validate.lm_eval import Tasks
    from moetier.validate.machines.cuda.live import OnDevice
    from moetier.validate.machines.live_disk import OnDisk

SAMPLE = "moe-tiny"
CACHE = "MOETIER_CACHE"
"""The variable that says where runs of plain models, and sketches of their channels, are kept."""

PACKAGES = ("torch", "transformers")

_CHUNK = 1 << 24
_CONTENT = (".safetensors", ".json", ".bin", ".model", ".txt", ".jinja")


def run_live(
    config: RunConfig,
    *,
    where: str | None = None,
    records: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    tasks: Tasks | None = None,
) -> tuple[dict[str, Any], str | None]:
    """Run *config* inside its live model; return what `run` returns, with accuracy.

    *tasks* of lm-evaluation-harness are asked in place of the config's questions, and their scores
    are under `lm_eval`. The second value says how a policy that claims to be lossless was not, and
    is None when all is well. *where*, *records* and *progress* are as for `run` and `evaluate`.
    """
    check_installed()
    from moetier.validate.evaluate import evaluate
    from moetier.validate.evaluate_arms import Extras

    assert config.live is not None
    asked = config.evaluate
    with inside(where) if where else nullcontext(), ExitStack() as stack:
        profile = load_hardware(config.hardware)
        fingerprint = checkpoint_fingerprint(config.live)
        digest = Digest()
        sinks: list[OnColumns] = [digest]
        if records is not None:
            sinks.append(stack.enter_context(RecordWriter(records)))
        popularity = config.popularity and open_trace_file(config.popularity).source
        with inside("live"):
            loaded = _load(checkpoint(config.live), fingerprint)
        questions = questions_of(config)
        asking = None
        if tasks is not None:
            from moetier.validate.lm_eval import asking as ask

            asking = ask(tasks)
        result = evaluate(
            loaded,
            setting_of(config, profile),
            questions,
            Extras(asked.batch_size, asked.long_prompts, asked.long_tokens, asked.max_new_tokens),
            sinks=sinks,
            predictor=_predictor(config),
            popularity=popularity or None,
            plain_folder=cache_folder(),
            sketch_folder=cache_folder(),
            calibration=_calibration(config, questions),
            progress=progress,
            asking=asking,
            machine=_machine(config, loaded, stack),
        )
    said = outcome(config, result, fingerprint, digest.hex())
    packages = (*PACKAGES, *(("lm_eval",) if tasks else ()))
    said["provenance"] |= {package: version(package) for package in packages}
    return said, result.failure


def _machine(config: RunConfig, loaded: Loaded, stack: ExitStack) -> OnDisk | OnDevice | None:
    """Return where the experts of *config* live; None where time is simulated.

    For a GPU, which *stack* closes, the model is moved there, and back at the end.
    """
    asked = config.machine
    if asked is None or asked.kind == "simulated":
        return None
    if asked.kind == "disk":
        return _disk(asked)
    from moetier.validate.machines.cuda import torch_cuda
    from moetier.validate.machines.cuda.live import OnDevice

    given = [name for name in ("pace", "latency", "folder") if getattr(asked, name)]
    if given:
        raise InputError(
            f"`{given[0]}` is of a disk, and the machine is a GPU",
            where="machine",
            way_out="leave it out, or use `machine: {kind: disk}`",
        )
    device = torch_cuda.open_cuda()
    stack.callback(device.close)
    before = loaded.model.device
    stack.callback(loaded.model.to, before)
    loaded.model.to(device.torch)
    return OnDevice(device, asked.lanes)


def _disk(asked: MachineConfig) -> OnDisk:
    """Return how experts live on a disk."""
    from moetier.validate.machines.live_disk import OnDisk
    from moetier.validate.machines.pacing import Pace

    if asked.pace is None and asked.latency:
        raise InputError(
            "a latency without a pace is kept by nothing",
            where="machine.latency",
            way_out="give `pace`, such as 200 MB/s, or leave the latency out",
        )
    folder = None if asked.folder is None else Path(asked.folder)
    if folder is not None and not folder.is_dir():
        raise InputError("is not a folder", where=folder, way_out="name one for `machine.folder`")
    pace = None if asked.pace is None else Pace(asked.pace, asked.latency)
    return OnDisk(asked.lanes, pace, folder)


def checkpoint(text: str) -> Path:
    """Return the folder of the checkpoint *text*: a path, or the name of the sample."""
    if text == SAMPLE:
        return moe_tiny_path()
    with inside("live"):
        folder = find_file(text)
        if not folder.is_dir():
            raise InputError(
                "is not a folder", where=text, way_out=f"name a checkpoint folder, or '{SAMPLE}'"
            )
    return folder


def checkpoint_fingerprint(text: str) -> str:
    """Return a hash of what a checkpoint's files hold, without loading the model."""
    folder = checkpoint(text).resolve()
    files = sorted(path for path in folder.iterdir() if path.suffix in _CONTENT)
    if not files:
        raise InputError("holds no checkpoint", where=text, way_out="name a checkpoint folder")
    return _hash(tuple((str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in files))


def live_key(config: RunConfig) -> dict[str, str]:
    """Return what decides the outcome of a live run beside its config: model, questions, code."""
    assert config.live is not None
    found = {"checkpoint": checkpoint_fingerprint(config.live)}
    if config.evaluate.prompts is not None:
        with inside("evaluate.prompts"):
            content = find_file(config.evaluate.prompts).read_bytes()
        found["prompts"] = hashlib.sha256(content).hexdigest()
    if isinstance(config.predictor, str) and config.predictor.endswith(".safetensors"):
        content = Path(_predictor_file(config.predictor)).read_bytes()
        found["predictor"] = hashlib.sha256(content).hexdigest()
    for package in PACKAGES:
        if importlib.util.find_spec(package) is not None:
            found[package] = version(package)
    return found


def questions_of(config: RunConfig) -> list[Question]:
    """Return what the model is asked: the questions of a file, or moe-tiny's tasks."""
    from moetier.validate.evaluate_questions import read_questions, tiny_questions

    asked = config.evaluate
    if asked.prompts is None:
        return tiny_questions(asked.items, asked.seed)
    with inside("evaluate.prompts"):
        return read_questions(find_file(asked.prompts))[: asked.items]


def _calibration(config: RunConfig, questions: list[Question]) -> list[str]:
    """Return texts, other than the *questions*, that thresholds may be set on; moe-tiny has some.

    Nobody knows which prompts of a file, or beside it, might be used.
    """
    from moetier.validate.evaluate_questions import tiny_calibration

    return (
        tiny_calibration(questions, seed=config.evaluate.seed)
        if not config.evaluate.prompts
        else []
    )


def _predictor(config: RunConfig) -> str | Predictor | None:
    """Return the predictor of *config*: its kind, its checkpoint, or itself."""
    if isinstance(config.predictor, dict):
        return create(config.predictor, "predictor")
    return config.predictor and _predictor_file(config.predictor)


def _predictor_file(text: str) -> str:
    """Return *text* with the path of a checkpoint resolved."""
    if not text.endswith(".safetensors"):
        return text
    with inside("predictor"):
        return str(find_file(text))


def cache_folder() -> Path:
    """Return where runs of plain models, and sketches, are kept between processes."""
    given = os.environ.get(CACHE)
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "moetier" / "plain"


def check_installed() -> None:
    """Raise `InputError` where a package that runs models is missing."""
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise InputError(
                f"a live model needs {package}, which is not installed",
                where="live",
                way_out="`pip install moetier[models]`",
            )


@lru_cache(maxsize=1)
def _load(folder: Path, fingerprint: str) -> Loaded:
    """Load a model, or return the one of the run before; *fingerprint* tells an edited one."""
    from transformers.utils import logging

    from moetier.traces.capture.load import load_model
    from moetier.validate.evaluate import Loaded

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return Loaded(*load_model(str(folder)))
    finally:
        if shown:
            logging.enable_progress_bar()


@lru_cache(maxsize=8)
def _hash(files: tuple[tuple[str, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for path, _, size in files:
        digest.update(f"{Path(path).name} {size}\n".encode())
        with Path(path).open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()
