"""This module runs a policy inside a model: what it costs, and what it does to the answers.

Three passes, one cache that stays warm: the questions by greedy generation, which gives accuracy
and every figure of `simulate`; the true answers of those that went wrong, for their likelihood (of
those that went right it is known already); and long generation, to see whether the model falls
into loops. The plain model does the same, once for all policies, and is compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moetier.sim.machine.base import OnSpan
from moetier.sim.machine.hierarchy import build_hierarchy
from moetier.sim.planner import OnPlan
from moetier.sim.policy.base import Miss, Precision, Prefetch, Routing
from moetier.sim.policy.compose import Policy, compose
from moetier.sim.records import OnColumns
from moetier.sim.run import Result, Setting, Stage, set_up
from moetier.sim.warnings import limitations, modelled, warnings_of
from moetier.traces.capture.find import MoeLayer
from moetier.traces.capture.header import build_header
from moetier.traces.capture.load import load_model
from moetier.traces.capture.probe import probe
from moetier.traces.columns import ColumnSource
from moetier.traces.errors import InputError
from moetier.traces.formats import FORMATS
from moetier.traces.live import LiveModel
from moetier.traces.predictors.base import Predictor
from moetier.traces.predictors.learn.checkpoint import find_predictor
from moetier.traces.predictors.learn.running import attached
from moetier.traces.samples.tasks import Item
from moetier.traces.schema import Header
from moetier.validate.evaluate_arms import Asked, Count, Extras, first_difference
from moetier.validate.evaluate_plain import Plain
from moetier.validate.evaluate_questions import Question, encode, from_items
from moetier.validate.live import Driver
from moetier.validate.live_channels import ChannelReaders, reading_channels
from moetier.validate.live_generate import Output
from moetier.validate.live_precision import computed_at
from moetier.validate.machines.cuda.live import OnDevice, on_device
from moetier.validate.machines.live_disk import OnDisk, on_disk
from moetier.validate.machines.live_model import Living

SMALL_EXPERTS = 1 << 20
"""Below as many weights an expert is computed by one thread: handing out costs more than it saves
(seven times the time, measured with two threads on moe-tiny)."""


Asking = Callable[[Any, Any, list[Question], Extras], Asked]
"""Makes the requests of an evaluation from model, tokenizer, questions and how to ask."""


class Loaded(NamedTuple):
    """A model in memory and its tokenizer."""

    model: Any
    tokenizer: Any


@dataclass(frozen=True)
class Evaluation(Result):
    """A result with what the model answered; *failure* says how a lossless policy was not."""

    header: Header
    outputs: list[Output]
    long_outputs: list[Output]
    failure: str | None = None


def evaluate(
    checkpoint: str | Path | Loaded,
    setting: Setting,
    items: Sequence[Question | Item | str],
    extras: Extras | None = None,
    *,
    predictor: str | Predictor | None = None,
    sinks: Sequence[OnColumns] = (),
    on_plan: OnPlan | None = None,
    on_span: OnSpan | None = None,
    popularity: ColumnSource | None = None,
    plain_folder: Path | None = None,
    sketch_folder: Path | None = None,
    calibration: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
    asking: Asking | None = None,
    machine: OnDisk | OnDevice | None = None,
) -> Evaluation:
    """Run the policy of *setting* inside the model at *checkpoint* while it answers *items*.

    Args:
        checkpoint: A folder or an id, or a model that is loaded; it is left as it was.
        setting: As for `simulate`.
        items: Questions, items of moe-tiny's tasks, or plain prompts, whose answers are not known.
        extras: How they are asked.
        predictor: For policies that use predictions: a predictor, a kind of one that needs no
            training, or a checkpoint of one.
        sinks: Hear of the records, as `on_plan` and `on_span` hear of decisions and lanes.
        on_plan: See there.
        on_span: See there.
        popularity: A trace whose counts a `static` part may use.
        plain_folder: Where runs of the plain model are kept between processes.
        sketch_folder: Where sketches of channels are kept between processes.
        calibration: Texts, none of them asked about, that thresholds of channels are set on.
        progress: Called with (requests done, requests in all), the plain model's included.
        asking: Makes what is asked, in place of the *items*.
        machine: Let the experts really live in a file, or in pinned memory beside a device that has
            the model, and measure; without it, time is simulated.

    Raises:
        InputError: If the model cannot be driven, or the policy cannot be run inside one.
    """
    how = extras or Extras()
    loaded = checkpoint if isinstance(checkpoint, Loaded) else Loaded(*load_model(str(checkpoint)))
    model, tokenizer = loaded
    questions = [_question(item) for item in items]
    if not (questions or asking) or how.batch_size < 1 or how.long_prompts < 0:
        raise InputError(
            f"{len(questions)} items, batches of {how.batch_size}, {how.long_prompts} long texts",
            where="evaluate",
            way_out="give at least one item and batches of at least one",
        )
    was_training = bool(model.training)
    model.eval()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), one_thread(model):
            torch.manual_seed(setting.seed)
            seen = probe(model)
            asked = (asking or Asked)(model, tokenizer, questions, how)
            prompts = asked.prompts()
            header = build_header(model, tokenizer, prompts, seen, setting.seed)
            told = find_predictor(predictor, model) if isinstance(predictor, str) else predictor
            if told is not None:
                entries = told.entries(header.geometry)
                header = header.model_copy(update={"predictors": entries})
            _check_weights(header, setting)
            _check_predictor(setting, told)
            stage = set_up(header, setting, asked.extent(), has_future=False)
            plain = Plain(model, header.provenance.model_fingerprint or "", plain_folder)
            count = Count(progress, 2 * (len(asked.requests) + len(asked.long)))
            with (
                attached(told, model) if told is not None else nullcontext() as running,
                reading_channels(
                    model,
                    seen.layers,
                    stage.policy.precision,
                    [encode(tokenizer, text, "a calibration text") for text in calibration],
                    folder=sketch_folder,
                    progress=progress,
                ) as screen,
                _living(model, seen.layers, header, stage, machine, screen) as living,
            ):
                driver = (Driver if living is None else living.driver)(
                    stage, setting, sinks=sinks, on_plan=on_plan, on_span=on_span,
                    popularity=popularity,
                )  # fmt: skip
                scores = _reads_scores(stage.policy) or running is not None
                live = LiveModel(model, seen, running, with_scores=scores, screen=screen)
                found = asked.run(live, driver, count)
            without = asked.run_plain(plain, count)
            difference = first_difference(found, without)
            if difference and not stage.policy.alters_output:  # do not trust what was kept
                without = asked.run_plain(plain, count, again=True)
                difference = first_difference(found, without)
            count.finish()
    finally:
        model.train(was_training)
    metrics = driver.metrics.summary()
    metrics |= asked.figures(found, without)
    metrics["lossless"] = difference is None
    failure = None
    if difference is not None and not stage.policy.alters_output:
        failure = f"policy '{stage.policy.name}' says it is lossless, but {difference}"
    top_k = header.geometry.top_k
    said = [*_limitations(header, setting, stage.policy, stage.expert_ops, how)]
    said += [*stage.costs.remarks, *asked.remarks()]
    if living is not None:
        untrue = modelled(setting.profile)
        said = [*living.limitations, *(text for text in said if text not in untrue)]
    return Evaluation(
        metrics=metrics,
        warnings=warnings_of(stage.policy, stage.layout, stage.capacities[0], top_k, metrics),
        known_limitations=[
            *said,
            *([told.assumption] if told is not None and told.assumption else []),
        ],
        elapsed_ns=driver.elapsed_ns,
        stage=stage,
        header=header,
        outputs=found.answers,
        long_outputs=found.long,
        failure=failure,
    )


def _question(item: Question | Item | str) -> Question:
    if isinstance(item, Item):
        return from_items([item])[0]
    return Question(item) if isinstance(item, str) else item


def _check_weights(header: Header, setting: Setting) -> None:
    """Raise `InputError` where the bytes of a checkpoint's format are not known."""
    if setting.weights is None and header.weights not in FORMATS:
        raise InputError(
            f"the checkpoint is stored in {header.weights}, whose bytes are not known",
            where="weights",
            way_out=f"say which to count: {', '.join(FORMATS)}; the model computes as it is",
        )


def _check_predictor(setting: Setting, predictor: Predictor | None) -> None:
    """Raise `InputError` where a policy reads predictions and nobody makes them."""
    cached = build_hierarchy(setting.profile, setting.tiers, setting.exclusive).cached
    policy = compose(setting.policy, cached)
    readers = [part for part in policy.parts if part.uses_predictions]
    if readers and predictor is None:
        named = next((part.predictor for part in readers if part.predictor), None)
        raise InputError(
            f"policy '{policy.name}' reads predictions"
            + (f" of '{named}'" if named else "")
            + ", and no predictor runs beside the model",
            where="predictor",
            way_out="give a kind, or a checkpoint that `moetier train-predictor` made",
        )


def _living(
    model: Any,
    layers: Sequence[MoeLayer],
    header: Header,
    stage: Stage,
    machine: OnDisk | OnDevice | None,
    screen: ChannelReaders | None,
) -> AbstractContextManager[Living | None]:
    """Return where the experts of *layers* are for a run; None: where they were."""
    if machine is None:
        return computed_at(layers, stage.policy.precision)
    if isinstance(machine, OnDisk):
        return on_disk(model, layers, header, stage, machine, channels=screen)
    return on_device(model, layers, header, stage, machine)


def _reads_scores(policy: Policy) -> bool:
    """Return whether a part may look at router scores."""
    defaults = (
        type(policy.routing).route is Routing.route,
        type(policy.precision).needed is Precision.needed,
        type(policy.prefetch).candidates is Prefetch.candidates,
        type(policy.miss).resolve is Miss.resolve,
    )
    return not all(defaults)


def _limitations(
    header: Header, setting: Setting, policy: Policy, expert_ops: int, how: Extras
) -> list[str]:
    """Return what the run took for granted."""
    found = limitations(header, setting.profile, policy, expert_ops, replayed=False)
    if setting.weights is not None and setting.weights != header.weights:
        found.append(
            f"bytes are those of {setting.weights}; the model computes in "
            f"{header.provenance.dtype}, and accuracy is that of its own weights"
        )
    if how.batch_size > 1:
        found.append(f"{how.batch_size} requests run in lockstep, padded on the left")
    return found


@contextmanager
def one_thread(model: Any) -> Iterator[None]:
    """Compute a small model on one thread."""
    small = all(
        value[0].numel() < SMALL_EXPERTS
        for name, value in model.named_parameters()
        if ".experts." in name and value.dim() == 3
    )
    kept = torch.get_num_threads()
    if small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(kept)
