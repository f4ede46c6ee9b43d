"""This module searches for good policies: it draws trials, runs them, and says what is best."""

from __future__ import annotations

import copy
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from moetier.experiments.config import check_run
from moetier.experiments.files import inside
from moetier.experiments.findings import flatten
from moetier.experiments.overrides import set_key
from moetier.experiments.perform import Backend, check_backend, is_done, perform
from moetier.experiments.points import Point, axes, key_of, spell
from moetier.experiments.resolve import resolved
from moetier.experiments.search_choice import Choice, choose, closest, excess
from moetier.experiments.search_config import Search, value_of
from moetier.experiments.store import (
    SEARCH,
    SWEEP,
    Store,
    dump_json,
    versions,
    write_text,
    write_yaml,
)
from moetier.traces.errors import InputError

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import Trial

RECOMMENDED = "recommended.yaml"
FRONT = "front.csv"
LOST = {"status": "failed", "error": "its result is not there"}

Row = dict[str, Any]


@dataclass(frozen=True)
class Found:
    """What came of a search."""

    folder: Path
    trials: dict[str, int]  # in all, and by what became of them
    refused: dict[str, int]  # how many trials, by why
    left_out: dict[str, str]  # parts that were not tried, and why
    rows: list[Row]
    choice: Choice
    closest: Row | None = None  # where no trial meets every constraint
    command: str | None = None  # that reruns the recommended policy
    failed: list[str] = field(default_factory=list)


def run_search(
    search: Search,
    folder: Path,
    *,
    jobs: int = 1,
    backend: Backend = "loky",
    on_done: Callable[[int, int], None] | None = None,
) -> Found:
    """Run the trials that *folder* does not hold yet, then say what was found there.

    Trials are drawn in batches, each from what the batches before it gave, so that the same search
    has the same trials whatever *jobs* and *backend*. A batch's runs are stored by the key of their
    content, as a sweep's are. *on_done* hears (trials done, trials in all).

    Raises:
        InputError: If an objective is null in every trial.
    """
    check_backend(backend)
    try:
        from moetier.experiments.search_study import open_study, trial_of
    except ModuleNotFoundError as error:
        raise InputError(
            f"a search needs {error.name}, which is not installed",
            way_out="`pip install moetier[search]`",
        ) from None
    store = Store(folder)
    store.refuse(SWEEP, "a sweep")
    store.create()
    config = search.config
    with open_study(search, folder) as study:
        for start in range(0, config.trials, config.batch):
            numbers = range(start, min(start + config.batch, config.trials))
            _run_batch(search, study, [trial_of(study, n) for n in numbers], store, jobs, backend)
            if on_done is not None:
                on_done(numbers.stop, config.trials)
        return _gather(search, study, store)


def draw(search: Search, values: dict[str, Any]) -> Point:
    """Return the run that *values*, one per dimension, stand for.

    Raises:
        InputError: If they do not fit together.
    """
    data = copy.deepcopy(search.config.base)
    chosen = search.space.pick(values)
    for key, value in chosen.items():
        set_key(data, key, copy.deepcopy(value))
    if search.space.seams:
        data["policy"].pop("name", None)  # would be the same for all
    config = check_run(data, search.where)
    with inside(search.where):
        return Point(
            key_of(config), config, {key: spell(key, item) for key, item in chosen.items()}
        )


def _run_batch(
    search: Search, study: Study, trials: list[Trial], store: Store, jobs: int, backend: Backend
) -> None:
    """Run *trials*, all of which are drawn before the first result is told."""
    from moetier.experiments.search_study import suggest

    drawn: list[Point | str] = []
    for trial in trials:
        values = suggest(trial, search.space.dimensions)
        try:
            drawn.append(draw(search, values))
        except InputError as error:
            drawn.append(error.problem)
    unique = {point.key: point for point in drawn if isinstance(point, Point)}
    todo = [point for key, point in unique.items() if not _is_known(store, key)]
    for _ in perform(todo, store.folder, False, jobs, backend):
        pass
    states = [item.state for item in study.get_trials(deepcopy=False)]
    for trial, point in zip(trials, drawn, strict=True):
        if not states[trial.number].is_finished():
            _tell(search, study, trial, point, store)


def _is_known(store: Store, key: str) -> bool:
    """Return whether the run *key* needs no other try: it is done, or it was refused."""
    found = store.point(key)
    return is_done(store, key, False) or (found is not None and bool(found.get("refused")))


def _tell(search: Search, study: Study, trial: Trial, point: Point | str, store: Store) -> None:
    """Tell the study what came of *trial*; a refusal is a string, or lies in the store."""
    from optuna.trial import TrialState

    from moetier.experiments.search_study import REASON, set_excess

    values: list[float | None] = []
    reason: str | None
    state = TrialState.PRUNED
    if isinstance(point, str):
        reason = point
    else:
        outcome = store.point(point.key) or LOST
        reason = outcome.get("refused") or outcome["error"]
        if outcome["status"] == "done":
            row = flatten(outcome)
            values = [value_of(row, goal.name) for goal in search.goals]
            null = [goal.name for goal in search.goals if value_of(row, goal.name) is None]
            reason = f"{null[0]} is null" if null else None
            limits = map(str, search.limits)
            set_excess(trial, dict(zip(limits, excess(row, search.limits), strict=True)))
        elif not outcome.get("refused"):
            state = TrialState.FAIL
    if reason is None:
        study.tell(trial, [value for value in values if value is not None])
        return
    trial.set_user_attr(REASON, reason)
    study.tell(trial, state=state)


def _gather(search: Search, study: Study, store: Store) -> Found:
    """Write the table of results, the front, and the recommended policy."""
    from optuna.trial import TrialState

    from moetier.experiments.search_study import REASON, values_of

    trials = study.get_trials(deepcopy=False)[: search.config.trials]
    points: dict[str, Point] = {}
    times: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for trial in trials:
        if trial.state == TrialState.PRUNED:
            refused[trial.user_attrs[REASON]] += 1
        else:
            point = draw(search, values_of(trial.params, search.space.dimensions))
            points.setdefault(point.key, point)
            times[point.key] += 1
    outcomes = {key: store.point(key) or LOST for key in points}
    columns = dict.fromkeys(name for point in points.values() for name in axes(point))
    rows = [
        {
            **columns, **axes(point), "status": outcomes[key]["status"],
            "error": outcomes[key]["error"], **flatten(outcomes[key]),
            "warnings": " | ".join(outcomes[key].get("warnings", [])),
            "trials": times[key], "key": key,
        }
        for key, point in points.items()
    ]  # fmt: skip
    done = [row for row in rows if row["status"] == "done"]
    choice = choose(done, search.goals, search.limits)
    edge = {row["key"] for row in choice.front}
    for row in rows:
        over = excess(row, search.limits) if row["status"] == "done" else None
        row["feasible"] = None if over is None else all(x <= 0 for x in over)
        row["on_front"] = row["key"] in edge
    _write(search, store, rows, choice)
    if not any(trial.state == TrialState.COMPLETE for trial in trials):
        _explain_nothing(refused, [str(row["error"]) for row in rows])
    best = choice.best
    if best is None:  # what an earlier call recommended may stand there
        (store.folder / RECOMMENDED).unlink(missing_ok=True)
    return Found(
        folder=store.folder,
        trials={
            "all": len(trials),
            "different runs": len(rows),
            "refused": sum(refused.values()),
            "failed": len(rows) - len(done),
        },
        refused=dict(refused.most_common()),
        left_out=search.space.left_out,
        rows=rows,
        choice=choice,
        closest=None if best else closest(done, search.limits),
        command=_recommend(search, store.folder, points[best["key"]], choice) if best else None,
        failed=[f"{points[row['key']].label}: {row['error']}" for row in rows if row not in done],
    )


def _explain_nothing(refused: Counter[str], errors: list[str]) -> None:
    """Raise `InputError`: no trial has a value for every objective."""
    null = [reason for reason in refused if reason.endswith(" is null")]
    if null:
        raise InputError(
            f"{null[0]} in every trial",
            where="objectives",
            way_out="accuracy needs `live:`; docs/metrics.md says when a metric is null",
        )
    why = next(iter([*errors, *dict(refused.most_common())]), "none was run")
    raise InputError(f"no trial could be run: {why}", where="space", way_out="widen the space")


def _write(search: Search, store: Store, rows: list[Row], choice: Choice) -> None:
    import pandas as pd

    from moetier.traces.files import replacing

    store.gather(rows)
    write_yaml(store.folder / SEARCH, search.config.model_dump(mode="json", exclude_none=True))
    with replacing(store.folder / FRONT) as temporary:
        pd.DataFrame(choice.front).to_csv(temporary, index=False, lineterminator="\n")
    outcomes = {row["key"]: store.point(row["key"]) or LOST for row in rows}
    about = {
        "versions": versions() | {"optuna": version("optuna")},
        "fingerprints": {key: found.get("provenance") for key, found in outcomes.items()},
        "left_out": search.space.left_out,
        "rule": choice.rule,
    }  # fmt: skip
    write_text(store.folder / "provenance.json", dump_json(about) + "\n")


def _recommend(search: Search, folder: Path, point: Point, choice: Choice) -> str:
    """Write the run of *point* as YAML, and return the command that reruns it."""
    data = {key: value for key, value in resolved(point.config).items() if value is not None}
    data["policy"] = {"name": f"{search.config.name} recommended", **data["policy"]}
    path = folder / RECOMMENDED
    verb = "simulate" if point.config.live is None else "evaluate"
    command = f"moetier {verb} {shlex.quote(str(path))}"
    assert choice.best is not None
    figures = ", ".join(f"{g.name} {value_of(choice.best, g.name):.6g}" for g in search.goals)
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)
    header = f"# {command}\n# {choice.rule}: {figures}\n"
    write_text(path, header + text)
    return command
