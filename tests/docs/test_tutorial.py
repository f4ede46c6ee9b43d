"""Tests that the tutorial's commands do what it says, one after the other."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
FILES = {"mine.yaml": "tutorial.yaml", "mine-one.yaml": "tutorial-one.yaml"}
FILES["mine-live.yaml"] = "tutorial-live.yaml"
MAIN = "from moetier.experiments.cli import main; main()"

pytest.importorskip("torch", reason="needs the extra 'models'")


@pytest.fixture
def commands(commands_of: Callable[[Path], list[list[str]]]) -> list[list[str]]:
    return commands_of(PAGE)


def test_the_page_shows_every_file_that_it_uses(commands: list[list[str]]) -> None:
    text = PAGE.read_text()
    named = {word for command in commands for word in command if word.endswith(".yaml")}

    assert named == set(FILES)
    assert all(f'--8<-- "examples/{name}"' in text for name in FILES.values())


@pytest.mark.slow
def test_the_commands_work_in_their_order(commands: list[list[str]], tmp_path: Path) -> None:
    (tmp_path / "traces").symlink_to(ROOT / "traces")
    for name, example in FILES.items():
        shutil.copy(ROOT / "docs" / "examples" / example, tmp_path / name)
    said = {}
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-c", MAIN, *command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, (command, done.stderr)
        said[command[0]] = done.stdout

    assert list(tmp_path.glob("out/mine/*.png"))
    assert (tmp_path / "out" / "mine" / "results.csv").is_file()
    assert "12 of 12 points done" in said["sweep"]
    assert "accuracy" in said["evaluate"]
