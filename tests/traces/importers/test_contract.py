"""Tests that every importer passes, by being in the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moetier.traces.errors import InputError
from moetier.traces.importers import IMPORTERS


def test_the_importers_are_found() -> None:
    assert {"bigmoeonedge", "jsonl-layers"} <= set(IMPORTERS.names())


@pytest.mark.parametrize("name", IMPORTERS.names())
def test_an_importer_takes_source_and_out_and_says_what_it_does(name: str) -> None:
    parameters = IMPORTERS.parameters(name)

    assert [item.name for item in parameters[:2]] == ["source", "out"]
    assert all(item.default is not None for item in parameters[2:])
    assert IMPORTERS.summary(name).startswith("Import ")


@pytest.mark.parametrize("name", IMPORTERS.names())
@pytest.mark.parametrize("content", [None, b"", b"\x00\x01\xff\n\n", b"hello\nworld\n"])
def test_what_is_not_the_format_is_refused_with_the_file_named(
    name: str, content: Any, tmp_path: Path
) -> None:
    source = tmp_path / "in.dat"
    if content is not None:
        source.write_bytes(content)
    with pytest.raises(InputError, match=r"in\.dat: "):
        IMPORTERS.create(name, {"source": source, "out": tmp_path / "out.parquet"})

    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize("name", IMPORTERS.names())
def test_an_unknown_option_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"importer '{name}', parameter 'colour'"):
        IMPORTERS.create(name, {"source": tmp_path, "out": tmp_path, "colour": "red"})
