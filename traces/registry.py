"""This module turns a folder of files into a registry: one extension, one file.

A registry knows a package; the first look-up imports every module in it, and each module registers
what it defines. Nothing else lists the extensions, so adding one touches one file.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model

from moetier.traces.errors import InputError, nearest

T = TypeVar("T")

Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
E = TypeVar("E", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an extension, as `moetier list` shows it."""

    name: str
    type: str
    default: str | None


class Registry(Generic[T]):
    """The extensions found in one *package*; *kind* names them in messages ("eviction policy")."""

    def __init__(self, kind: str, package: str) -> None:
        """Name the *kind* of extension and the *package* whose modules define them."""
        self.kind, self.package = kind, package
        self._entries: dict[str, Callable[..., T]] = {}
        self._loaded = False

    def register(self, name: str) -> Callable[[E], E]:
        """Return a decorator that files a class or function under *name*."""

        def decorate(entry: E) -> E:
            if name in self._entries:
                raise ValueError(f"{self.kind} '{name}' is registered twice")
            self._entries[name] = entry
            return entry

        return decorate

    def names(self) -> list[str]:
        """Return every registered name, sorted."""
        self._load()
        return sorted(self._entries)

    def get(self, name: str, where: str | None = None) -> Callable[..., T]:
        """Return what is filed under *name*; an unknown name suggests the nearest one."""
        self._load()
        if name not in self._entries:
            hint, known = nearest(name, self._entries), ", ".join(self.names())
            raise InputError(
                f"unknown {self.kind} '{name}'", where=where, way_out=f"{hint}known: {known}"
            )
        return self._entries[name]

    def create(self, name: str, arguments: dict[str, Any], where: str | None = None) -> T:
        """Build *name* with checked keyword *arguments*; a wrong key or type is named."""
        entry = self.get(name, where)
        parameters = _signature(entry)

        def refusal(key: str, problem: str, value: Any) -> InputError:
            known = ", ".join(parameters) or "none"
            return InputError(
                f"{self.kind} '{name}', parameter '{key}': {problem}",
                where=where,
                way_out=f"got {value!r}; its parameters are: {known}",
            )

        try:
            checked = _model(entry)(**arguments)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise refusal(key, first["msg"], first["input"]) from None
        for key, value in arguments.items():
            if isinstance(value, bool) and not isinstance(getattr(checked, key), bool):
                raise refusal(key, "true and false are no numbers", value)
        return entry(**{key: getattr(checked, key) for key in parameters})

    def defaults(self, name: str, where: str | None = None) -> dict[str, Any]:
        """Return the parameters of *name* that have a default, with it."""
        return {
            key: default
            for key, (_, default) in _signature(self.get(name, where)).items()
            if default is not inspect.Parameter.empty
        }

    def summary(self, name: str) -> str:
        """Return the first line of the docstring of *name*."""
        return (inspect.getdoc(self.get(name)) or "").partition("\n")[0]

    def parameters(self, name: str) -> list[Parameter]:
        """Return the parameters of *name* with their types and defaults."""
        return [
            Parameter(
                key,
                hint.__name__ if isinstance(hint, type) else _spell(hint),
                None if default is inspect.Parameter.empty else repr(default),
            )
            for key, (hint, default) in _signature(self.get(name)).items()
        ]

    def _load(self) -> None:
        if self._loaded:
            return
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self.package}.{module.name}")
        self._loaded = True


_CHECK = ConfigDict(extra="forbid", arbitrary_types_allowed=True, strict=False, allow_inf_nan=False)


@cache
def _model(entry: Callable[..., Any]) -> type[BaseModel]:
    """Return the model that checks the arguments of *entry*; making one takes a millisecond."""
    fields: dict[str, Any] = {
        key: (hint, ... if default is inspect.Parameter.empty else default)
        for key, (hint, default) in _signature(entry).items()
    }
    return create_model("arguments", __config__=_CHECK, **fields)


@cache
def _signature(entry: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    signature = inspect.signature(entry, eval_str=True)
    return {key: (item.annotation, item.default) for key, item in signature.parameters.items()}


def _spell(hint: Any) -> str:
    """Return a type as its source spells it, limits in words."""
    TypeAdapter(hint)  # a hint that cannot be checked is a bug of the extension
    if hint is type(None):
        return "None"
    if isinstance(hint, type) and not get_args(hint):
        return hint.__name__
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(_spell(part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return " | ".join(repr(part) for part in get_args(hint))
    outer: Any = get_origin(hint)
    if outer in (list, tuple, Sequence):
        inner = ", ".join("..." if part is ... else _spell(part) for part in get_args(hint))
        return f"{outer.__name__.lower()}[{inner}]"
    if get_origin(hint) is Annotated:
        limits = [
            f"{sign} {getattr(limit, name)}"
            for limit in hint.__metadata__[0].metadata
            for name, sign in (("ge", ">="), ("le", "<="))
            if hasattr(limit, name)
        ]
        return " ".join([hint.__origin__.__name__, *limits])
    return str(hint).replace("typing.", "")
