"""This module keeps a search's trials with Optuna, so that it goes on where it was stopped.

Every draw of a trial comes from a generator of its own, seeded by the search's seed, the trial's
number and the dimension's name. What a trial is therefore depends on the trials that it could see,
and not on how often the search was interrupted.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from moetier.experiments.search_config import Search
from moetier.experiments.search_space import Dimension
from moetier.traces.errors import InputError

JOURNAL = "journal.log"
LOCK = "search.lock"
STUDY = "search"  # whatever its name: a folder holds one
LARGEST = 1e300  # JSON has no infinity
REASON = "reason"  # of a trial that was not run to its end

_WITHOUT = ("trials",)  # may grow from one call to the next


class Seeded(BaseSampler):
    """A sampler of one *kind*, made anew for every draw from a seed of that draw's own."""

    def __init__(self, kind: str, seed: int, population: int) -> None:
        """Use *kind* (nsga2, tpe, random), the first *population* trials of which are random."""
        self._kind, self._seed, self._population = kind, seed, population

    def _sampler(self, trial: FrozenTrial, draw: str) -> BaseSampler:
        text = f"{self._seed} {trial.number} {draw}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
        if self._kind == "random":
            return RandomSampler(seed)
        if self._kind == "tpe":
            return TPESampler(n_startup_trials=self._population, seed=seed)
        return NSGAIISampler(population_size=self._population, seed=seed)

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the dimensions that are drawn together."""
        return self._sampler(trial, "space").infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the values of the dimensions that are drawn together."""
        return self._sampler(trial, "together").sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: Any
    ) -> Any:
        """Return the value of one dimension."""
        sampler = self._sampler(trial, param_name)
        return sampler.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Let the sampler prepare a trial."""
        self._sampler(trial, "before").before_trial(study, trial)

    def after_trial(
        self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """Let the sampler note a trial's end."""
        self._sampler(trial, "after").after_trial(study, trial, state, values)


class _NoLock(JournalFileOpenLock):
    """The folder's lock is enough."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


@contextmanager
def open_study(search: Search, folder: Path) -> Iterator[Study]:
    """Yield the study in *folder*, made if need be, for one process at a time.

    Raises:
        InputError: If another process has it, or it holds the trials of another search.
    """
    optuna.logging.set_verbosity(logging.ERROR)
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                "another search runs here", where=folder, way_out="wait, or use another --out"
            ) from None
        _cut_torn_line(folder / JOURNAL)
        study = _study(search, folder)
        _check_same(study, search, folder)
        yield study


def _study(search: Search, folder: Path) -> Study:
    """Return the one study that a folder can hold."""
    config = search.config
    try:
        storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL), _NoLock("")))
        return optuna.create_study(
            study_name=STUDY,
            storage=storage,
            sampler=Seeded(config.sampler, config.seed, config.batch),
            directions=["minimize" if g.better == "lower" else "maximize" for g in search.goals],
            load_if_exists=True,
        )
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        raise InputError(
            f"is damaged: {type(error).__name__}: {error}",
            where=folder / JOURNAL,
            way_out="remove it: trials are drawn again, and what was run is not run again",
        ) from None


def _cut_torn_line(path: Path) -> None:
    """Drop what a killed process wrote of a last line."""
    if path.exists():
        content = path.read_bytes()
        if not content.endswith(b"\n"):
            path.write_bytes(content[: content.rfind(b"\n") + 1])


def _check_same(study: Study, search: Search, folder: Path) -> None:
    asked = search.config.model_dump(mode="json", exclude=set(_WITHOUT))
    text = json.dumps(asked, sort_keys=True)
    before = study.user_attrs.get("search")
    if before is None:
        study.set_user_attr("search", text)
    elif before != text:
        held = json.loads(before)
        other = ", ".join(key for key in asked if held.get(key) != asked[key])
        raise InputError(
            f"holds a search with another {other}", where=folder, way_out="use another --out"
        )


def trial_of(study: Study, number: int) -> Trial:
    """Return the trial *number* as it was asked for before, or ask for it now."""
    known = study.get_trials(deepcopy=False)
    return Trial(study, known[number]._trial_id) if number < len(known) else study.ask()


def suggest(trial: Trial, dimensions: Sequence[Dimension]) -> dict[str, Any]:
    """Return the values that *trial* has for every dimension."""
    found = {}
    for item in dimensions:
        if item.ordered:
            found[item.name] = item.values[trial.suggest_int(item.name, 0, len(item.values) - 1)]
        else:
            found[item.name] = json.loads(trial.suggest_categorical(item.name, item.labels))
    return found


def values_of(params: Mapping[str, Any], dimensions: Sequence[Dimension]) -> dict[str, Any]:
    """Return what the *params* of a stored trial stand for."""
    return {
        item.name: item.values[params[item.name]] if item.ordered else json.loads(params[item.name])
        for item in dimensions
        if item.name in params
    }


def set_excess(trial: Trial, excess: Mapping[str, float]) -> None:
    """Let the sampler know by how much *trial* misses each limit, unless it does already."""
    known = trial.study.get_trials(deepcopy=False)[trial.number].constraints
    for name, value in excess.items():
        if name not in known:
            trial.set_constraint(name, min(value, LARGEST))
