"""Tests of registries: look-up, suggestions and checked arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from moetier.traces.errors import InputError
from moetier.traces.registry import Parameter, Positive, Registry, Share


@pytest.fixture
def registry() -> Registry[str]:
    made: Registry[str] = Registry("greeting", "moetier.traces.models")

    @made.register("hello")
    def hello(name: str, times: int = 1, mark: str | None = None) -> str:
        """Say hello.

        Loudly.
        """
        return f"hello {name}{mark or ''} " * times

    @made.register("bye")
    class Bye(str):
        pass

    return made


def test_names_are_sorted(registry: Registry[str]) -> None:
    assert registry.names() == ["bye", "hello"]


def test_an_unknown_name_suggests_the_nearest(registry: Registry[str]) -> None:
    with pytest.raises(InputError) as caught:
        registry.get("helo", where="run.yaml")

    assert str(caught.value) == (
        "run.yaml: unknown greeting 'helo'; did you mean 'hello'? known: bye, hello"
    )


def test_a_name_cannot_be_taken_twice(registry: Registry[str]) -> None:
    with pytest.raises(ValueError, match="greeting 'hello' is registered twice"):
        registry.register("hello")(str)


def test_arguments_are_converted(registry: Registry[str]) -> None:
    assert registry.create("hello", {"name": "you", "times": "2"}) == "hello you hello you "


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "parameter 'name': Field required"),
        ({"name": "you", "loud": 1}, "its parameters are: name, times, mark"),
        ({"name": "you", "times": "two"}, "parameter 'times': .* got 'two'"),
    ],
)
def test_wrong_arguments_are_named(
    registry: Registry[str], arguments: dict[str, object], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        registry.create("hello", arguments)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), ".nan"])
def test_numbers_are_finite(value: object) -> None:
    registry: Registry[float] = Registry("weight", "moetier.traces.models")

    @registry.register("scale")
    def scale(by: float | str = 1.0, share: tuple[float, float] = (0.0, 1.0)) -> float:
        return float(by) * share[1]

    if not isinstance(value, str):
        with pytest.raises(InputError, match="weight 'scale', parameter 'by"):
            registry.create("scale", {"by": value})
    with pytest.raises(InputError, match=r"parameter 'share\.1'"):
        registry.create("scale", {"share": [0, value]})


def test_true_is_no_number(registry: Registry[str]) -> None:
    with pytest.raises(InputError, match=r"parameter 'times': true and false are no numbers"):
        registry.create("hello", {"name": "you", "times": True})


def test_defaults_leave_out_what_must_be_given(registry: Registry[str]) -> None:
    assert registry.defaults("hello") == {"times": 1, "mark": None}


def test_summary_and_parameters_come_from_the_function(registry: Registry[str]) -> None:
    assert registry.summary("hello") == "Say hello."
    assert registry.parameters("hello") == [
        Parameter("name", "str", None),
        Parameter("times", "int", "1"),
        Parameter("mark", "str | None", "None"),
    ]


def test_a_file_dropped_into_the_package_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "dropped"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from moetier.traces.registry import Registry\nTHINGS = Registry('thing', __name__)\n"
    )
    (package / "one.py").write_text(
        "from dropped import THINGS\n@THINGS.register('one')\ndef one() -> int:\n    return 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import dropped  # type: ignore[import-not-found]  # made above

    assert dropped.THINGS.names() == ["one"]
    assert dropped.THINGS.create("one", {}) == 1


@pytest.mark.parametrize(
    ("hint", "said"),
    [
        (Positive | None, "int >= 1 | None"),
        (Share, "float >= 0 <= 1"),
        (Positive | list[Positive], "int >= 1 | list[int >= 1]"),
        (tuple[int, ...], "tuple[int, ...]"),
        (Literal["a", "b"] | None, "'a' | 'b' | None"),
        (float | str, "float | str"),
    ],
)
def test_a_type_is_spelled_as_in_the_source(hint: Any, said: str) -> None:
    registry: Registry[Any] = Registry("thing", "json")
    registry._loaded = True  # nothing to look for

    def made(value: Any) -> None:
        """Do nothing."""

    made.__annotations__["value"] = hint
    registry.register("made")(made)

    assert registry.parameters("made") == [Parameter("value", said, None)]
