"""Prompt files are read whole or refused with the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from moetier.traces.capture.prompts import prompts_sha256, read_prompts
from moetier.traces.errors import InputError


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_bytes(text.encode())
    return file


def test_text_is_one_prompt_a_line(tmp_path: Path) -> None:
    file = write(tmp_path, "p.txt", "first prompt\n\n  second, indented\r\nthird\u2028same line")

    assert read_prompts(file) == ["first prompt", "  second, indented", "third\u2028same line"]


def test_jsonl_holds_prompts_of_several_lines(tmp_path: Path) -> None:
    file = write(tmp_path, "p.jsonl", '{"prompt": "a\\nb", "id": 3}\n\n{"prompt": "c"}\n')

    assert read_prompts(str(file)) == ["a\nb", "c"]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": \n', r"p\.jsonl:2: is not JSON"),
        ("p.jsonl", '\n\n{"text": "a"}\n', r"p\.jsonl:3: has no 'prompt'"),
        ("p.jsonl", '["a"]\n', r"p\.jsonl:1: has no 'prompt'"),
        ("p.jsonl", '{"prompt": 7}\n', r"p\.jsonl:1: has a 'prompt' of 7"),
        ("p.jsonl", '{"prompt": "  "}\n', r"p\.jsonl:1: has a 'prompt' of '  '"),
        ("p.txt", "", r"p\.txt: holds no prompt"),
        ("p.txt", " \n\n", r"p\.txt: holds no prompt"),
        ("p.csv", "a\n", r"p\.csv: prompts in a '.csv' file"),
    ],
)
def test_what_is_not_a_prompt_is_refused_with_its_line(
    name: str, text: str, problem: str, tmp_path: Path
) -> None:
    file = write(tmp_path, name, text)

    with pytest.raises(InputError, match=problem):
        read_prompts(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_prompts(tmp_path / "none.txt")


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_bytes(b"fine\nfine\nna\xefve\n")

    with pytest.raises(InputError, match=r"p\.txt:3: is not UTF-8"):
        read_prompts(file)


def test_the_hash_depends_on_text_and_order_only() -> None:
    assert prompts_sha256(["a", "b"]) == prompts_sha256(("a", "b"))
    assert prompts_sha256(["a", "b"]) != prompts_sha256(["b", "a"])
    assert prompts_sha256(["a", "b"]) != prompts_sha256(["ab"])
    assert len(prompts_sha256(["a"])) == 64
