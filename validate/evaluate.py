"""This module runs a policy inside a model: what it costs, and what it does to the answers.

Three passes, one cache that stays warm: the questions by greedy generation, which gives accuracy
and every figure of `simulate`; the true answers of those that went wrong, for their likelihood (of
those that went right it is known already); and long generation, to see whether the model falls
into loops. The plain model does the same, once for all policies, and is compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moetier.sim.machine.base import OnSpan
from moetier.sim.memory import Extent
from moetier.sim.planner import OnPlan
from moetier.sim.policy.base import Miss, Precision, Prefetch, Routing
from moetier.sim.policy.compose import Policy
from moetier.sim.records import OnColumns
from moetier.sim.run import Result, Setting, set_up
from moetier.sim.warnings import limitations, warnings_of
from moetier.traces.capture.header import build_header
from moetier.traces.capture.load import load_model
from moetier.traces.capture.probe import probe
from moetier.traces.columns import ColumnSource
from moetier.traces.errors import InputError
from moetier.traces.live import Drive, LiveModel, LivePredictor
from moetier.traces.samples.tasks import Item
from moetier.traces.schema import Header
from moetier.validate.accuracy import Estimate, estimate, paired_difference
from moetier.validate.evaluate_loops import TAIL, loops
from moetier.validate.evaluate_plain import Plain
from moetier.validate.evaluate_questions import (
    Question,
    forced_of,
    from_items,
    is_right,
    requests_of,
)
from moetier.validate.live import Driver
from moetier.validate.live_generate import (
    Decoding,
    Output,
    Request,
    ends_of,
    generate,
    pad_of,
)

SMALL_EXPERTS = 1 << 20
"""Below as many weights an expert is computed by one thread: handing out costs more than it saves
(seven times the time, measured with two threads on moe-tiny)."""


class Loaded(NamedTuple):
    """A model in memory and its tokenizer."""

    model: Any
    tokenizer: Any


@dataclass(frozen=True)
class Extras:
    """How a model is questioned.

    The prompts of the first *long_prompts* questions also begin texts of *long_tokens* tokens that
    nothing ends; fewer than `TAIL` tokens cannot loop. *max_new_tokens* cuts what is generated,
    which else is as long as the true answer.
    """

    batch_size: int = 1
    long_prompts: int = 11
    long_tokens: int = 64
    max_new_tokens: int | None = None


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
    predictor: LivePredictor | None = None,
    sinks: Sequence[OnColumns] = (),
    on_plan: OnPlan | None = None,
    on_span: OnSpan | None = None,
    popularity: ColumnSource | None = None,
    plain_folder: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Run the policy of *setting* inside the model at *checkpoint* while it answers *items*.

    Args:
        checkpoint: A folder or an id, or a model that is loaded; it is left as it was.
        setting: As for `simulate`.
        items: Questions, items of moe-tiny's tasks, or plain prompts, whose answers are not known.
        extras: How they are asked.
        predictor: Fills the batches' predictions for policies that use them.
        sinks: Hear of the records, as `on_plan` and `on_span` hear of decisions and lanes.
        on_plan: See there.
        on_span: See there.
        popularity: A trace whose counts a `static` part may use.
        plain_folder: Where runs of the plain model are kept between processes.
        progress: Called with (requests done, requests in all), the plain model's included.

    Raises:
        InputError: If the model cannot be driven, or the policy cannot be run inside one.
    """
    how = extras or Extras()
    loaded = checkpoint if isinstance(checkpoint, Loaded) else Loaded(*load_model(str(checkpoint)))
    model, tokenizer = loaded
    questions = [_question(item) for item in items]
    if not questions or how.batch_size < 1 or how.long_prompts < 0:
        raise InputError(
            f"{len(questions)} items, batches of {how.batch_size}, {how.long_prompts} long texts",
            where="evaluate",
            way_out="give at least one item and batches of at least one",
        )
    was_training = bool(model.training)
    model.eval()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), _threads(model):
            torch.manual_seed(setting.seed)
            seen = probe(model)
            prompts = [question.prompt for question in questions]
            header = build_header(model, tokenizer, prompts, seen, setting.seed)
            asked = _Asked(model, tokenizer, questions, how)
            stage = set_up(header, setting, asked.extent(), has_future=False)
            driver = Driver(
                stage, setting, sinks=sinks, on_plan=on_plan, on_span=on_span, popularity=popularity
            )
            live = LiveModel(model, seen, predictor, with_scores=_reads_scores(stage.policy))
            plain = Plain(model, header.provenance.model_fingerprint or "", plain_folder)
            count = _Count(progress, 2 * (len(questions) + len(asked.long)))
            found = asked.run(live, driver, count)
            elapsed = driver.finish()
            without = asked.run_plain(plain, count)
            difference = _first_difference(found, without)
            if difference and not stage.policy.alters_output:  # do not trust what was kept
                without = asked.run_plain(plain, count, again=True)
                difference = _first_difference(found, without)
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
    return Evaluation(
        metrics=metrics,
        warnings=warnings_of(stage.policy, stage.layout, stage.capacities[0], top_k, metrics),
        known_limitations=_limitations(header, setting, stage.policy, stage.expert_ops, how),
        elapsed_ns=elapsed,
        stage=stage,
        header=header,
        outputs=found.answers,
        long_outputs=found.long,
        failure=failure,
    )


@dataclass(slots=True)
class _Found:
    """What one arm produced; *nll* is per question, None where the answer is not known."""

    answers: list[Output]
    long: list[Output]
    nll: list[float | None]


class _Asked:
    """The requests of an evaluation, for both arms."""

    def __init__(
        self, model: Any, tokenizer: Any, questions: list[Question], how: Extras
    ) -> None:
        self.model, self.tokenizer, self.questions = model, tokenizer, questions
        self.requests = requests_of(tokenizer, questions, how.max_new_tokens)
        n = how.long_prompts if how.long_tokens else 0
        self.long = [Request(r.prompt, how.long_tokens) for r in self.requests[:n]]
        pad = pad_of(model, tokenizer)
        self.decoding = Decoding(how.batch_size, ends_of(model), pad)
        self.endless = Decoding(how.batch_size, (), pad)
        self.judged_loops = bool(self.long) and how.long_tokens >= TAIL

    def extent(self) -> Extent:
        """Return the most that the requests can come to."""
        size, context, steps = self.decoding.batch_size, 0, 0
        for requests in (self.requests, self.long):
            for start in range(0, len(requests), size):
                batch = requests[start : start + size]
                context = max(context, sum(len(r.prompt) + r.limit - 1 for r in batch))
                steps += max(r.limit for r in batch)
        prefill = sum(len(r.prompt) for r in self.requests)
        decode = sum(r.limit - 1 for r in self.requests)
        return Extent(context, steps, prefill, decode)

    def run(self, live: LiveModel, driver: Driver, count: _Count) -> _Found:
        """Let the driven model answer; only the questions themselves are recorded."""
        with live.driven(driver.decide) as drive:
            answers = self._generate(self.requests, self.decoding, drive, count)
            driver.recording = False
            wrong = self._wrong(answers)
            forced = self._generate([request for _, request in wrong], self.decoding, drive, None)
            long = self._generate(self.long, self.endless, drive, count)
        return self._found(answers, long, wrong, forced)

    def run_plain(self, plain: Plain, count: _Count, *, again: bool = False) -> _Found:
        """Let the model answer by itself."""
        answers = plain.run(self.requests, self.decoding, count.add, again=again)
        wrong = self._wrong(answers)
        requests = [request for _, request in wrong]
        forced = plain.run(requests, self.decoding, again=again) if wrong else []
        long = plain.run(self.long, self.endless, count.add, again=again) if self.long else []
        return self._found(answers, long, wrong, forced)

    def figures(self, found: _Found, plain: _Found) -> dict[str, Any]:
        """Return accuracy, likelihood and loops, beside the plain model's."""
        right, right_plain = self._right(found), self._right(plain)
        nll = [value for value in found.nll if value is not None]
        nll_plain = [value for value in plain.nll if value is not None]
        accuracy, mean_nll = _estimate(right), _estimate(nll)
        return {
            "items": len(self.questions),
            "accuracy": None if accuracy is None else accuracy.mean,
            "accuracy_se": None if accuracy is None else accuracy.standard_error,
            "accuracy_by_task": self._by_task(right),
            "accuracy_difference": _difference(right, right_plain),
            "nll": None if mean_nll is None else mean_nll.mean,
            "nll_se": None if mean_nll is None else mean_nll.standard_error,
            "nll_difference": _difference(nll, nll_plain),
            "repetition_share": self._loops(found),
            "plain": {
                "accuracy": _mean(right_plain),
                "nll": _mean(nll_plain),
                "repetition_share": self._loops(plain),
            },
        }

    def _generate(
        self, requests: list[Request], decoding: Decoding, drive: Drive, count: _Count | None
    ) -> list[Output]:
        on_batch = None if count is None else count.add
        return generate(self.model, requests, decoding, drive, first=0, on_batch=on_batch)

    def _wrong(self, answers: list[Output]) -> list[tuple[int, Request]]:
        """Return the questions whose true answer was not generated, each forced along it."""
        found = []
        cases = zip(self.questions, self.requests, answers, strict=True)
        for at, (question, request, output) in enumerate(cases):
            true = forced_of(self.tokenizer, question, request)
            if true.forced and output.tokens[: true.limit] != true.forced:
                found.append((at, true))
        return found

    def _found(
        self,
        answers: list[Output],
        long: list[Output],
        wrong: list[tuple[int, Request]],
        forced: list[Output],
    ) -> _Found:
        nll: list[float | None] = [
            sum(output.nll[: forced_of(self.tokenizer, question, request).limit])
            if question.answer
            else None
            for question, request, output in zip(
                self.questions, self.requests, answers, strict=True
            )
        ]
        for (at, _), output in zip(wrong, forced, strict=True):
            nll[at] = sum(output.nll)
        return _Found(answers, long, nll)

    def _right(self, found: _Found) -> list[float]:
        cases = zip(self.questions, found.answers, strict=True)
        return [float(is_right(self.tokenizer, q, output)) for q, output in cases if q.answer]

    def _by_task(self, right: list[float]) -> dict[str, Any] | None:
        if not right:
            return None
        answered = [question for question in self.questions if question.answer]
        by_task: dict[str, list[float]] = {}
        for question, value in zip(answered, right, strict=True):
            by_task.setdefault(question.task, []).append(value)
        found = {task: estimate(values) for task, values in by_task.items()}
        return {
            task: {"mean": value.mean, "standard_error": value.standard_error, "n": value.n}
            for task, value in found.items()
        }

    def _loops(self, found: _Found) -> float | None:
        """Return the share of long texts that loop; None where none is long enough."""
        return _mean([float(loops(o.tokens)) for o in found.long]) if self.judged_loops else None


class _Count:
    """Adds up what is done for a progress bar."""

    def __init__(self, progress: Callable[[int, int], None] | None, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def add(self, n: int) -> None:
        """Take in *n* more requests."""
        self.done = min(self.done + n, self.total)
        if self.progress is not None:
            self.progress(self.done, self.total)

    def finish(self) -> None:
        """Say that all is done: what was kept from before did not have to be run."""
        self.add(self.total - self.done)


def _question(item: Question | Item | str) -> Question:
    if isinstance(item, Item):
        return from_items([item])[0]
    return Question(item) if isinstance(item, str) else item


def _first_difference(a: _Found, b: _Found) -> str | None:
    """Return where two arms part, None where tokens and logits are the same, bit by bit."""
    for what, mine, other in (("item", a.answers, b.answers), ("long text", a.long, b.long)):
        for number, (x, y) in enumerate(zip(mine, other, strict=True), start=1):
            if x.tokens != y.tokens:
                at = next(
                    (i for i, (s, t) in enumerate(zip(x.tokens, y.tokens, strict=False)) if s != t),
                    min(len(x.tokens), len(y.tokens)),
                )
                return f"token {at + 1} of {what} {number} is not the plain model's"
            if x.digest != y.digest:
                return f"the logits of {what} {number} are not bit for bit the plain model's"
    return None


def _difference(a: Sequence[float], b: Sequence[float]) -> dict[str, Any] | None:
    """Return the paired difference and its 95 % interval."""
    if not a:
        return None
    found = paired_difference(a, b)
    return {"mean": found.mean, "low": found.low, "high": found.high, "n": found.n}


def _estimate(values: Sequence[float]) -> Estimate | None:
    return estimate(values) if values else None


def _mean(values: Sequence[float]) -> float | None:
    return estimate(values).mean if values else None


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
    """Return what the run took for granted; what a replay assumes does not hold here."""
    found = [
        text
        for text in limitations(header, setting.profile, policy, expert_ops)
        if not text.startswith("replayed lossy policy")
    ]
    if setting.weights is not None and setting.weights != header.weights:
        found.append(
            f"bytes are those of {setting.weights}; the model computes in "
            f"{header.provenance.dtype}, and accuracy is that of its own weights"
        )
    if how.batch_size > 1:
        found.append(f"{how.batch_size} requests run in lockstep, padded on the left")
    return found


@contextmanager
def _threads(model: Any) -> Iterator[None]:
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
