"""This module asks a model its questions, with a policy inside it and without, and compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moetier.sim.memory import Extent
from moetier.traces.errors import InputError
from moetier.traces.live import Drive, LiveModel
from moetier.validate.accuracy import Estimate, estimate, paired_difference
from moetier.validate.evaluate_loops import TAIL, loops
from moetier.validate.evaluate_plain import Plain
from moetier.validate.evaluate_questions import Question, forced_of, is_right, requests_of
from moetier.validate.live import Driver
from moetier.validate.live_generate import (
    Decoding,
    Output,
    Request,
    ends_of,
    generate,
    pad_of,
)


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


@dataclass(slots=True)
class Found:
    """What one arm produced; *nll* is per question, None where the answer is not known."""

    answers: list[Output]
    long: list[Output]
    nll: list[float | None]


class Asked:
    """The requests of an evaluation, for both arms."""

    def __init__(self, model: Any, tokenizer: Any, questions: list[Question], how: Extras) -> None:
        """Make the requests; *how* says in what batches, and which texts are long."""
        self.model, self.tokenizer, self.questions = model, tokenizer, questions
        self.requests = requests_of(tokenizer, questions, how.max_new_tokens)
        n = how.long_prompts if how.long_tokens else 0
        self.long = [Request(r.prompt, how.long_tokens) for r in self.requests[:n]]
        _check_lengths(model, [*self.requests, *self.long])
        pad = pad_of(model, tokenizer)
        self.decoding = Decoding(how.batch_size, ends_of(model), pad)
        self.endless = Decoding(how.batch_size, (), pad)
        self.judged_loops = bool(self.long) and how.long_tokens >= TAIL

    def prompts(self) -> list[str]:
        """Return the texts that the requests begin with."""
        return [question.prompt for question in self.questions]

    def remarks(self) -> list[str]:
        """Return what the run took for granted about how it asked."""
        return []

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

    def run(self, live: LiveModel, driver: Driver, count: Count) -> Found:
        """Let the driven model answer; only the questions themselves are recorded."""
        with live.driven(driver.decide) as drive:
            answers = self._generate(self.requests, self.decoding, drive, count)
            driver.finish()
            wrong = self._wrong(answers)
            forced = self._generate([request for _, request in wrong], self.decoding, drive, None)
            long = self._generate(self.long, self.endless, drive, count)
        return self._found(answers, long, wrong, forced)

    def run_plain(self, plain: Plain, count: Count, *, again: bool = False) -> Found:
        """Let the model answer by itself."""
        answers = plain.run(self.requests, self.decoding, count.add, again=again)
        wrong = self._wrong(answers)
        requests = [request for _, request in wrong]
        forced = plain.run(requests, self.decoding, again=again) if wrong else []
        long = plain.run(self.long, self.endless, count.add, again=again) if self.long else []
        return self._found(answers, long, wrong, forced)

    def figures(self, found: Found, plain: Found) -> dict[str, Any]:
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
            "nll_by_task": self._by_task(nll),
            "nll_difference": _difference(nll, nll_plain),
            "repetition_share": self._loops(found),
            "plain": {
                "accuracy": _mean(right_plain),
                "nll": _mean(nll_plain),
                "repetition_share": self._loops(plain),
            },
        }

    def _generate(
        self, requests: list[Request], decoding: Decoding, drive: Drive, count: Count | None
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
    ) -> Found:
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
        return Found(answers, long, nll)

    def _right(self, found: Found) -> list[float]:
        cases = zip(self.questions, found.answers, strict=True)
        return [float(is_right(self.tokenizer, q, output)) for q, output in cases if q.answer]

    def _by_task(self, values: list[float]) -> dict[str, Any] | None:
        """Return the mean of *values*, one per answered question, of each task."""
        if not values:
            return None
        answered = [question for question in self.questions if question.answer]
        by_task: dict[str, list[float]] = {}
        for question, value in zip(answered, values, strict=True):
            by_task.setdefault(question.task, []).append(value)
        found = {task: estimate(each) for task, each in by_task.items()}
        return {
            task: {"mean": value.mean, "standard_error": value.standard_error, "n": value.n}
            for task, value in found.items()
        }

    def _loops(self, found: Found) -> float | None:
        """Return the share of long texts that loop; None where none is long enough."""
        return _mean([float(loops(o.tokens)) for o in found.long]) if self.judged_loops else None


class Count:
    """Adds up what is done for a progress bar."""

    def __init__(self, progress: Callable[[int, int], None] | None = None, total: int = 0) -> None:
        """Count up to *total*, telling *progress* each time."""
        self.progress, self.total, self.done = progress, total, 0

    def add(self, n: int) -> None:
        """Take in *n* more requests."""
        self.done = min(self.done + n, self.total)
        if self.progress is not None:
            self.progress(self.done, self.total)

    def finish(self) -> None:
        """Say that all is done: what was kept from before did not have to be run."""
        self.add(self.total - self.done)


def first_difference(a: Found, b: Found) -> str | None:
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


def _check_lengths(model: Any, requests: list[Request]) -> None:
    """Raise `InputError` if one of *requests* goes beyond the positions that *model* knows."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    lengths = ((len(r.prompt) + r.limit, len(r.prompt), r.limit) for r in requests)
    longest = max(lengths, default=(0, 0, 0))
    if most is not None and longest[0] > most:
        raise InputError(
            f"a prompt of {longest[1]} tokens and {longest[2]} more are beyond the {most} "
            "positions of the model",
            where="evaluate",
            way_out="ask for fewer tokens, or use shorter prompts",
        )


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
