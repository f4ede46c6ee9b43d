"""This module reads YAML strictly and explains what does not fit a schema."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from moetier.traces.errors import InputError, nearest

M = TypeVar("M", bound=BaseModel)


_TYPES = ("str", "int", "float", "bool")


class _Loader(yaml.SafeLoader):
    """The safe loader, except that a key given twice in one mapping is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise InputError(
                    f"line {line}: key '{key.value}' is given twice",
                    way_out=f"the first is on line {seen[key.value]}; keep one",
                )
            seen[key.value] = line
        return super().construct_mapping(node, deep=deep)


def read_yaml(file: Path | Traversable) -> Any:
    """Return what the YAML *file* holds; raise `InputError`, with file and line, if it cannot."""
    return parse_yaml(read_text(file), str(file))


def read_text(file: Path | Traversable) -> str:
    """Return the text of *file*; raise `InputError` if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(file)) from None
    except UnicodeDecodeError:
        raise InputError("is not a text file in UTF-8", where=str(file)) from None


def parse_yaml(text: str, where: str) -> Any:
    """Return what the YAML *text* holds; raise `InputError`, with *where* and line, else."""
    try:
        return yaml.load(text, Loader=_Loader)
    except InputError as error:
        raise InputError(error.problem, where=where, way_out=error.way_out) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error)
        raise InputError(f"{line}not valid YAML: {problem}", where=where) from None


def check(model: type[M], data: Any, where: str | Path) -> M:
    """Return *data* as a *model*; raise `InputError` naming *where*, the key, value and way out."""
    if not isinstance(data, dict):
        raise InputError(
            f"expected a mapping of keys, got {type(data).__name__}",
            where=where,
            way_out=f"its keys are {', '.join(model.model_fields)}",
        )
    try:
        found = model.model_validate(data)
    except ValidationError as error:
        raise explain(error, model, where) from None
    for key, value in _truths(data, found):
        raise InputError(
            f"{key}: {str(value).lower()} is no number", where=where, way_out="give a number"
        )
    return found


def _truths(data: dict[str, Any], model: BaseModel, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Yield the keys of *data* whose true or false was taken as a number, and that value."""
    for key, value in data.items():
        found = getattr(model, str(key), None)
        if isinstance(value, bool) and isinstance(found, int | float) and found is not value:
            yield f"{prefix}{key}", value
        elif isinstance(value, dict) and isinstance(found, BaseModel):
            yield from _truths(value, found, f"{prefix}{key}.")


def explain(error: ValidationError, model: type[BaseModel], where: str | Path) -> InputError:
    """Turn the first finding of *error*, raised by *model*, into an `InputError`."""
    # A misspelt key first: the key that it leaves missing explains itself then.
    first, *others = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    loc = _place(first["loc"])
    key = ".".join(str(part) for part in loc)
    alike = [other for other in others if _place(other["loc"]) == loc]  # other types of a union
    others = [other for other in others if other not in alike]
    way_out = f"and {len(others)} more in this file" if others else ""
    match first["type"]:
        case "missing":
            problem = "this key is missing"
        case "extra_forbidden":
            known = _keys_at(model, loc[:-1])
            hint = nearest(loc[-1], known)
            problem = "unknown key"
            way_out = f"{hint}known: {', '.join(known)}" if known else "take it out"
        case "value_error":
            problem = str(first.get("ctx", {}).get("error"))  # our own words, which name the value
        case _:
            more = dict.fromkeys(item["msg"].removeprefix("Input should be ") for item in alike)
            wanted = " or ".join([first["msg"], *more])
            problem = f"{wanted}, got {first['input']!r}"
    return InputError(f"{key}: {problem}" if key else problem, where=where, way_out=way_out)


def _place(loc: Sequence[int | str]) -> list[int | str]:
    """Return *loc* without what is no key: marks of pydantic, and the types of a union."""
    return [at for at in loc if at not in _TYPES and "[" not in str(at)]


def _keys_at(schema: Any, loc: list[int | str]) -> list[str]:
    """Return the keys that *schema* knows at *loc*; none where *loc* leads beyond the models.

    Steps into models, lists, dicts, and classes that name the model of their rows in `row`.
    """
    for part in loc:
        if isinstance(schema, type) and issubclass(schema, BaseModel):
            field = schema.model_fields.get(str(part))
            schema = field.annotation if field else None
        else:
            inner = [arg for arg in get_args(schema) if arg is not Ellipsis]
            schema = inner[-1] if inner else getattr(schema, "row", None)
        if get_origin(schema) in (UnionType, Union):
            schema = next(arg for arg in get_args(schema) if arg is not type(None))
    return list(getattr(schema, "model_fields", {}))
