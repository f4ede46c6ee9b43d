"""This module asks a model the tasks of lm-evaluation-harness, with a policy inside it and without.

Every request runs as `live_generate` runs one: the context is the prefill, then one decode step a
token, forced along the continuation where its likelihood is asked. So a policy that acts in decode
only acts on every scored token but the first, and accuracy comes with the time, energy and misses
of the same steps. lm-eval's own HFLM would score a whole text in one pass, all of it prefill.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetier.traces.errors import InputError
from moetier.traces.live import LiveModel
from moetier.validate.accuracy import paired_difference
from moetier.validate.evaluate_arms import Asked, Count, Extras, Found
from moetier.validate.evaluate_plain import Plain
from moetier.validate.evaluate_questions import Question
from moetier.validate.live import Driver
from moetier.validate.live_generate import Output, Request, generate

Run = Callable[[list[Request]], list[Output]]


@dataclass(frozen=True)
class Tasks:
    """Which tasks to ask: their names, or paths of task YAML files, and how."""

    names: tuple[str, ...]
    limit: int | None = None  # documents of each task
    fewshot: int | None = None  # default: what the task says
    seed: int = 0


def asking(tasks: Tasks) -> Callable[[Any, Any, list[Question], Extras], TasksAsked]:
    """Return what `evaluate` takes to ask *tasks*.

    Raises:
        InputError: If lm-eval is not installed or a task is not known.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError(
            "tasks of lm-evaluation-harness need lm-eval, which is not installed",
            where="--lm-eval",
            way_out="`pip install moetier[lm-eval]`",
        )
    return lambda model, tokenizer, questions, how: TasksAsked(
        model, tokenizer, questions, how, tasks
    )


class TasksAsked(Asked):
    """The requests that lm-eval makes of *tasks*, for both arms."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        questions: list[Question],
        how: Extras,
        tasks: Tasks,
    ) -> None:
        """Collect the requests, with a model that answers nothing."""
        if how.batch_size != 1:
            raise InputError(
                f"batches of {how.batch_size} with tasks of lm-eval",
                where="evaluate.batch_size",
                way_out="use 1: texts of a task differ in length",
            )
        super().__init__(model, tokenizer, [], how)
        self.tasks, self.results = tasks, dict[str, Any]()
        self._names, self._manager = _known(tasks)
        self.cut = 0  # contexts that did not fit
        collected: list[Request] = []

        def collect(requests: list[Request]) -> list[Output]:
            collected.extend(requests)
            return [Output((), (0.0,), "") for _ in requests]

        self._ask("collected", collect)
        if not collected:
            raise InputError("ask nothing", where="--lm-eval", way_out="give tasks with documents")
        self.requests = collected

    def prompts(self) -> list[str]:
        """Return the contexts of the requests."""
        return [self.tokenizer.decode(list(request.prompt)) for request in self.requests]

    def remarks(self) -> list[str]:
        """Return how lm-eval's requests were run."""
        found = [
            "lm-eval: a context is read as one prefill, and again for every continuation of it; "
            "continuations are forced token by token, each a decode step, but for the first "
            "token, which the prefill gives"
        ]
        if any(request.forced is None for request in self.requests):
            found.append(
                "lm-eval: a text goes on to the model's end token or max_gen_toks; steps after a "
                "stop string count, though the text is cut there"
            )
        if self.cut:
            found.append(f"lm-eval: {self.cut} contexts were cut on the left to fit the model")
        return found

    def run(self, live: LiveModel, driver: Driver, count: Count) -> Found:
        """Let the driven model answer; all of it is recorded."""
        outputs: list[Output] = []
        with live.driven(driver.decide) as drive:

            def run(requests: list[Request]) -> list[Output]:
                first = len(outputs)
                found = generate(
                    self.model, requests, self.decoding_of(requests), drive, first=first,
                    on_batch=count.add,
                )  # fmt: skip
                outputs.extend(found)
                return found

            self._ask("policy", run)
        driver.finish()
        return Found(outputs, [], [])

    def run_plain(self, plain: Plain, count: Count, *, again: bool = False) -> Found:
        """Let the model answer by itself."""
        outputs: list[Output] = []

        def run(requests: list[Request]) -> list[Output]:
            found = plain.run(requests, self.decoding_of(requests), count.add, again=again)
            outputs.extend(found)
            return found

        self._ask("plain", run)
        return Found(outputs, [], [])

    def decoding_of(self, requests: Sequence[Request]) -> Any:
        """Return how *requests* are decoded: forced ones are not ended by any token."""
        return self.endless if requests and requests[0].forced is not None else self.decoding

    def figures(self, found: Found, plain: Found) -> dict[str, Any]:
        """Return the metrics of every task, beside the plain model's and paired by document."""
        return {
            **super().figures(Found([], [], []), Found([], [], [])),
            "items": sum(len(samples) for samples in self.results["policy"]["samples"].values()),
            "lm_eval": {
                task: {
                    name: self._metric(task, name)
                    for name, value in scores.items()
                    if isinstance(value, (int, float)) and "," in name and "_stderr," not in name
                }
                for task, scores in self.results["policy"]["results"].items()
            },
        }

    def _metric(self, task: str, name: str) -> dict[str, Any]:
        """Return a metric `NAME,FILTER` of *task* in both arms."""
        both = [self.results[arm] for arm in ("policy", "plain")]
        metric, _, kind = name.partition(",")
        mine, other = (result["results"][task] for result in both)
        error = mine.get(f"{metric}_stderr,{kind}")
        values = [_per_document(result["samples"].get(task, []), metric, kind) for result in both]
        change = None
        if all(values):
            found = paired_difference(*values)
            change = {"mean": found.mean, "low": found.low, "high": found.high, "n": found.n}
        return {
            "value": mine[name],
            "stderr": error if isinstance(error, float) else None,
            "plain": other[name],
            "difference": change,
        }

    def _ask(self, arm: str, run: Run) -> None:
        """Let lm-eval ask its tasks of *run*, and keep what it says."""
        from lm_eval.evaluator import simple_evaluate  # pyright: ignore[reportMissingImports]

        from moetier.validate.lm_eval_model import build_model

        model, self.cut = build_model(self.model, self.tokenizer, run), 0
        with _quiet():
            self.results[arm] = simple_evaluate(
                model=model,
                tasks=[*self._names],
                task_manager=self._manager,
                num_fewshot=self.tasks.fewshot,
                limit=self.tasks.limit,
                bootstrap_iters=0 if arm == "collected" else 1000,
                log_samples=arm != "collected",
                random_seed=self.tasks.seed,
                numpy_random_seed=self.tasks.seed,
                torch_random_seed=self.tasks.seed,
                fewshot_random_seed=self.tasks.seed,
            )
        self.cut = model.cut


def _known(tasks: Tasks) -> tuple[list[str], Any]:
    """Return the names of the tasks and the manager that knows them."""
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    files = [Path(name) for name in tasks.names if name.endswith((".yaml", ".yml"))]
    for file in files:
        if not file.is_file():
            raise InputError("no such file", where=file, way_out="name a task YAML of lm-eval")
    folders: list[str | Path] = sorted({file.resolve().parent for file in files})
    manager = TaskManager(include_path=folders or None)
    names = [_name_in(Path(n)) if n.endswith((".yaml", ".yml")) else n for n in tasks.names]
    known = set(manager.all_tasks)
    for name in names:
        if name not in known:
            raise InputError(
                f"unknown task '{name}'",
                where="--lm-eval",
                way_out="name one of `lm-eval ls tasks`, or the path of a task YAML",
            )
    return names, manager


def _name_in(file: Path) -> str:
    # not parsed as YAML: a task may hold lm-eval's own tags, such as !function
    found = re.search(
        r"^task:\s*[\"']?([^\s\"'#]+)", file.read_text(encoding="utf-8"), re.MULTILINE
    )
    if found is None:
        raise InputError("has no `task: NAME`", where=file, way_out="name the task")
    return found[1]


def _per_document(samples: list[dict[str, Any]], metric: str, kind: str) -> list[float]:
    """Return a metric document by document, nothing where it is no number of a document."""
    chosen = sorted(
        (s for s in samples if s.get("filter", kind) == kind), key=lambda s: s["doc_id"]
    )
    values = [sample.get(metric) for sample in chosen]
    plain = all(isinstance(value, (int, float)) for value in values)
    return [float(value) for value in values if value is not None] if plain else []


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep lm-eval's notes about defaults of tasks to itself."""
    logger = logging.getLogger("lm_eval")
    kept = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(kept)
