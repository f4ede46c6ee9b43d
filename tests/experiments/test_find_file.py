"""Tests of finding files and placing errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from moetier.experiments.files import find_file, inside
from moetier.traces.errors import InputError


def test_the_current_directory_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "hw_profiles"
    folder.mkdir()
    (folder / "phone-ufs4.yaml").write_text("mine")

    assert find_file("hw_profiles/phone-ufs4.yaml").read_text() == "mine"


def test_then_the_files_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    found = find_file("hw_profiles/phone-ufs4.yaml")

    assert found.is_absolute()
    assert found.read_text().startswith("name: phone-ufs4")


def test_an_absolute_path_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("")

    assert find_file(path) == path


@pytest.mark.parametrize("text", ["nowhere/x.yaml", "/nowhere/x.yaml"])
def test_a_missing_file_is_named(text: str) -> None:
    with pytest.raises(InputError, match=rf"{text}: no such file; paths go from"):
        find_file(text)


def test_places_add_up_from_the_outside_in() -> None:
    with (
        pytest.raises(InputError, match=r"^a\.yaml: policy: wrong; right$"),
        inside("a.yaml"),
        inside("policy"),
    ):
        raise InputError("wrong", way_out="right")


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(KeyError), inside("a.yaml"):
        raise KeyError("x")


def test_a_body_without_errors_is_left_alone() -> None:
    with inside("a.yaml"):
        value = 1

    assert value == 1
