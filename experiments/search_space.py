"""This module is what a search chooses from: parts, their parameters, and other keys of a run."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from types import NoneType
from typing import Annotated, Any, Literal, TypeGuard, get_args, get_origin

from moetier.experiments.config import SOURCES, RunConfig, parse_capacity, spell_capacity
from moetier.sim.policy.base import Part
from moetier.sim.policy.seams import SEAMS
from moetier.traces.errors import InputError, nearest

ALL = "all"
"""As the parts of a seam: every registered one, each with ranges for its parameters."""

STEPS = 20  # that a range without `step` is cut into
POWER = 4  # a whole default from here on that is a power of two is halved and doubled
BEYOND = 4  # a number without an upper limit goes up to so many times its default

# What neither a type nor a default tells.
SENSIBLE: dict[tuple[str, str, str], list[Any]] = {
    ("precision", "uniform", "bits"): [2, 3, 4, 6, 8],
    ("precision", "bit-sliced", "bits"): [[8, 4], [6, 3], [4, 2]],
    ("precision", "channels", "reads"): ["12.5 %", "17.8 %", "25 %", "35 %", "50 %"],
    ("prefetch", "window-aware", "depth"): [1, 2, [1, 2]],
}

WhyNot = Callable[[Part], str | None]


@dataclass(frozen=True)
class Dimension:
    """One choice: a name and its possible *values*; *ordered* where near ones are alike."""

    name: str
    values: list[Any]
    ordered: bool = False

    @property
    def labels(self) -> list[str]:
        """Return the values as texts that JSON reads back."""
        return [json.dumps(value) for value in self.values]


@dataclass(frozen=True)
class Option:
    """One part of a seam, with what is fixed of it and what is chosen."""

    label: str
    fixed: dict[str, Any]  # `kind` and parameters
    chosen: list[Dimension]


@dataclass(frozen=True)
class Space:
    """Seams (`routing`, `eviction.dram`) with their parts, and dotted keys with their values."""

    seams: dict[str, list[Option]]
    keys: list[Dimension]
    left_out: dict[str, str] = field(default_factory=dict)  # "seam part": why

    @property
    def dimensions(self) -> list[Dimension]:
        """Return every choice, also those that matter only beside another.

        A choice is made even where it has no effect: a search that crosses two policies then always
        knows all of both.
        """
        found = list(self.keys)
        for seam, options in self.seams.items():
            found.append(Dimension(seam, [option.label for option in options]))
            found += [dimension for option in options for dimension in option.chosen]
        return [dimension for dimension in found if len(dimension.values) > 1]

    def pick(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config keys that *values*, one per dimension, stand for, by dotted key."""
        found = {key.name: values.get(key.name, key.values[0]) for key in self.keys}
        tiers: dict[str, Any] = {}
        for seam, options in self.seams.items():
            label = values.get(seam, options[0].label)
            part = _part(next(item for item in options if item.label == label), values)
            name, _, tier = seam.partition(".")
            if tier:
                tiers[tier] = part
            else:
                found[f"policy.{name}"] = part
        return found | ({"policy.eviction": tiers} if tiers else {})


def _part(option: Option, values: Mapping[str, Any]) -> Any:
    chosen = {
        item.name.rpartition(".")[2]: values.get(item.name, item.values[0])
        for item in option.chosen
    }
    full = option.fixed | chosen
    return full["kind"] if len(full) == 1 else full


def read_space(given: Mapping[str, Any] | None, why_not: WhyNot) -> Space:
    """Return the space that *given* describes; None stands for every part of every seam.

    *why_not* says why a part is no use here, or None; such parts are left out unless named.

    Raises:
        InputError: For an unknown seam, part, parameter or key, a bad range, or an empty space.
    """
    asked = dict.fromkeys(SEAMS, ALL) if given is None else dict(given)
    seams: dict[str, list[Option]] = {}
    keys: list[Dimension] = []
    left_out: dict[str, str] = {}
    for key, value in asked.items():
        name, _, tier = key.partition(".")
        if name in SEAMS and (not tier or name == "eviction"):
            seams[key] = _options(key, value, why_not, left_out)
        else:
            _check_key(key)
            keys.append(_dimension(key, value))
    space = Space(seams, keys, left_out)
    if "eviction" in seams and any(seam.startswith("eviction.") for seam in seams):
        raise InputError("`eviction` and `eviction.TIER` exclude each other", where="space")
    if seams and any(key.name.partition(".")[0] == "policy" for key in keys):
        raise InputError("`policy` and seams exclude each other", where="space")
    if not space.dimensions:
        raise InputError(
            "there is nothing to choose",
            where="space",
            way_out="give a seam several parts, or leave `space` out for all of every seam",
        )
    return space


def _check_key(key: str) -> None:
    first = key.partition(".")[0]
    known = [name for name in RunConfig.model_fields if name not in ("name", *SOURCES)]
    if first not in known and not (first in SOURCES and "." in key):
        raise InputError(
            f"unknown seam or key '{key}'",
            where="space",
            way_out=f"{nearest(key, [*SEAMS, *known])}seams: {', '.join(SEAMS)}; "
            f"keys: {', '.join(known)}",
        )


def _options(key: str, value: Any, why_not: WhyNot, left_out: dict[str, str]) -> list[Option]:
    """Return the parts of the seam *key*, noting those that are *left_out*."""
    where, seam = f"space.{key}", key.partition(".")[0]
    if value == ALL:
        return _every(key, seam, why_not, left_out)
    if not isinstance(value, list) or not value:
        raise InputError(
            f"expected a list of parts or '{ALL}', got {value!r}",
            where=where,
            way_out=f"parts: {', '.join(SEAMS[seam].names())}",
        )
    found: list[Option] = []
    for item in value:
        given = {"kind": item} if isinstance(item, str) else item
        if not isinstance(given, dict) or "kind" not in given:
            raise InputError(f"expected a name or a mapping with `kind`, got {item!r}", where=where)
        kind = str(given["kind"])
        known = _parameters(seam, kind, where)
        same = sum(option.fixed["kind"] == kind for option in found)
        label = f"{kind}#{same + 1}" if same else kind
        fixed: dict[str, Any] = {"kind": kind}
        chosen = []
        for name, wanted in given.items():
            if name == "kind":
                continue
            if name not in known:
                raise InputError(
                    f"{kind} has no parameter '{name}'",
                    where=where,
                    way_out=f"{nearest(name, known)}its parameters: {', '.join(known) or 'none'}",
                )
            if isinstance(wanted, list) or _is_range(wanted):
                chosen.append(_dimension(f"{key}.{label}.{name}", wanted))
            else:
                fixed[name] = wanted
        option = Option(label, fixed, chosen)
        SEAMS[seam].create(kind, _first(option), where)  # refuses a missing parameter, a bad value
        found.append(option)
    return found


def _every(key: str, seam: str, why_not: WhyNot, left_out: dict[str, str]) -> list[Option]:
    found = []
    for kind in SEAMS[seam].names():
        chosen = []
        for name, item in _parameters(seam, kind, f"space.{key}").items():
            values, ordered = SENSIBLE.get((seam, kind, name)), False
            if values is None:
                values, ordered = derived(item.annotation, item.default)
            if values:
                chosen.append(Dimension(f"{key}.{kind}.{name}", values, ordered))
        option = Option(kind, {"kind": kind}, chosen)
        try:
            reason = why_not(SEAMS[seam].create(kind, _first(option)))
        except InputError as error:
            reason = str(error)
        if reason is None:
            found.append(option)
        else:
            left_out[f"{seam} {kind}"] = reason
    return found


def _first(option: Option) -> dict[str, Any]:
    """Return the parameters of the last of every choice; a first one may mean "not at all"."""
    chosen = {item.name.rpartition(".")[2]: item.values[-1] for item in option.chosen}
    return {key: value for key, value in (option.fixed | chosen).items() if key != "kind"}


def _parameters(seam: str, kind: str, where: str) -> dict[str, inspect.Parameter]:
    entry = SEAMS[seam].get(kind, where)
    return dict(inspect.signature(entry, eval_str=True).parameters)


def derived(hint: Any, default: Any) -> tuple[list[Any], bool]:
    """Return values worth trying for a parameter of type *hint*, and whether they are ordered.

    No values for a type that says nothing of its range: the parameter then keeps its *default*.
    """
    if hint is bool:
        return [False, True], False
    if get_origin(hint) is Literal:
        return list(get_args(hint)), False
    limits: dict[str, Any] = {}
    if get_origin(hint) is Annotated:
        hint, about = get_args(hint)[:2]
        for limit in getattr(about, "metadata", []):
            limits |= {name: getattr(limit, name) for name in ("ge", "le") if hasattr(limit, name)}
    if hint not in (int, float) or default in (None, inspect.Parameter.empty):
        return [], False
    if hint is int and default >= POWER and default & (default - 1) == 0:
        return [default // 2, default, default * 2], True
    low = limits.get("ge", 0)
    high = limits.get("le", max(BEYOND * default, 1 if hint is float else low + 3))
    return _grid(Fraction(str(low)), Fraction(str(high)), None, hint is int, hint), True


def _is_range(value: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping) and {"low", "high"} <= set(value)


def _dimension(name: str, value: Any) -> Dimension:
    """Return the choice that a list, or a range `{low, high, step}`, describes."""
    where = f"space.{name}"
    if isinstance(value, list) and value:
        return Dimension(name, value)
    if not _is_range(value) or set(value) - {"low", "high", "step"}:
        raise InputError(
            f"expected a list or a range, got {value!r}",
            where=where,
            way_out="write [0, 1, 2] or {low: 0, high: 1, step: 0.1}",
        )
    given = [value["low"], value["high"], value.get("step")]
    (low, high, step), spell = _numbers(given, where)
    if low > high or (step is not None and step <= 0):
        raise InputError(f"the range {value!r} is empty", where=where, way_out="put `low` first")
    whole = all(isinstance(item, int | NoneType) for item in given) or spell is _spell_bytes
    return Dimension(name, _grid(low, high, step, whole, spell), ordered=True)


def _numbers(given: list[Any], where: str) -> tuple[list[Any], Callable[[Fraction], Any]]:
    """Return the ends and the step of a range as fractions, and how to write its values."""
    numbers = [item for item in given if item is not None]
    if all(isinstance(item, int | float) and not isinstance(item, bool) for item in numbers):
        whole = all(isinstance(item, int) for item in numbers)
        found = [None if item is None else Fraction(str(item)) for item in given]
        return found, int if whole else float
    try:
        sizes = [None if item is None else parse_capacity(item) for item in given]
    except InputError as error:
        raise InputError(error.problem, where=where, way_out=error.way_out) from None
    shares = [isinstance(size, Fraction) for size in sizes if size is not None]
    if all(shares):
        return [None if size is None else size * 100 for size in sizes], _spell_share
    if any(shares):
        raise InputError("sizes and shares cannot share a range", where=where)
    return [None if size is None else Fraction(size) for size in sizes], _spell_bytes


def _spell_share(percent: Fraction) -> str:
    return f"{float(percent):g} %"


def _spell_bytes(size: Fraction) -> str:
    return spell_capacity(int(size))


def _grid(
    low: Fraction, high: Fraction, step: Fraction | None, whole: bool, spell: Callable[[Any], Any]
) -> list[Any]:
    """Return the values from *low* up to *high*, which is always the last."""
    if step is None:
        step = (high - low) / STEPS or Fraction(1)
        step = Fraction(ceil(step)) if whole else step
    found = [low + at * step for at in range(int((high - low) / step) + 1)]
    if found[-1] != high:
        found.append(high)
    return [spell(value) for value in found]
