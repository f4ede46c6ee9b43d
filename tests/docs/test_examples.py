"""Tests that the files which the how-to pages show work where the pages say they go.

They are put into a copy of the package, each as one more file, and nothing else is touched.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
PLACES = {
    "mru.py": "sim/policy/eviction",
    "my-moe.yaml": "traces/models",
    "stay.py": "traces/predictors",
    "one_line.py": "traces/importers",
}
RUN = ROOT / "experiments" / "configs" / "one-run.yaml"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package in it, and every example in its place."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "src" / "moetier", folder / "moetier", ignore=_not_needed)
    for name, place in PLACES.items():
        shutil.copy(EXAMPLES / name, folder / "moetier" / place)
    return folder


def _not_needed(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if name == "__pycache__"}


def python(package: Path, *arguments: str, cwd: Path = ROOT) -> str:
    """Run Python with the copy of the package, and return what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(package)},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def moetier(package: Path, *arguments: str, cwd: Path = ROOT) -> str:
    code = "from moetier.experiments.cli import main; main()"
    return python(package, "-c", code, *arguments, cwd=cwd)


@pytest.mark.parametrize("page", ["policy", "machine", "model", "predictor", "importer"])
def test_the_commands_of_a_page_work_in_their_order(
    page: str, package: Path, tmp_path: Path, commands_of: Callable[[Path], list[list[str]]]
) -> None:
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    shutil.copy(EXAMPLES / "small-board.yaml", tmp_path)
    (tmp_path / "log.txt").write_text("7 0 3,1\n7 2 0,15\n8 0 3,2\n8 2 4,5\n")
    commands = commands_of(ROOT / "docs" / "howto" / f"{page}.md")
    capture = [words for words in commands if "PATH_OR_NAME" in words or "mine.parquet" in words]
    ours = [words for words in commands if words not in capture]  # the tutorial runs a capture

    said = [moetier(package, *words, cwd=tmp_path) for words in ours]

    assert len(said) >= 1
    assert all(said)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("policies", "mru"),
        ("models", "my-moe"),
        ("predictors", "stay"),
        ("importers", "one-line"),
    ],
)
def test_a_file_in_its_folder_is_found(kind: str, name: str, package: Path) -> None:
    listed = {entry["name"] for entry in json.loads(moetier(package, "list", kind, "--json"))}

    assert name in listed


def test_the_policy_fulfils_the_contract(package: Path) -> None:
    code = "import moetier, sys; print(moetier.__file__)"
    assert str(package) in python(package, "-c", code)

    said = python(
        package, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:cov", "-n0",
        "tests/contract/test_parts.py", "-k", "mru",
    )  # fmt: skip

    assert " passed" in said
    assert "failed" not in said


def test_the_policy_runs(package: Path) -> None:
    said = moetier(package, "simulate", str(RUN), "--json", "--set", "policy.eviction=mru")

    assert json.loads(said)["config"]["policy"]["eviction"] == "mru"
    assert json.loads(said)["misses"] > 0


def test_the_machine_needs_no_place_in_the_package(package: Path) -> None:
    said = moetier(
        package, "simulate", str(RUN), "--json", "--set",
        f"hardware={EXAMPLES / 'small-board.yaml'}", "--set", "synthetic.geometry=olmoe-1b-7b",
        "--set", "capacity={dram: 30 %}",
    )  # fmt: skip

    assert json.loads(said)["tpot_ms"] > 0
    assert "unverified numbers in 'small-board'" in " ".join(json.loads(said)["known_limitations"])


def test_the_model_has_a_size_and_runs(package: Path) -> None:
    said = moetier(
        package, "simulate", str(RUN), "--json", "--set", "synthetic.geometry=my-moe",
        "--set", "weights=bf16",
    )  # fmt: skip

    assert json.loads(said)["expert_bytes_total"] == 15 * 32 * 3 * 1024 * 512 * 2


def test_the_predictor_is_asked(package: Path) -> None:
    said = moetier(
        package, "simulate", str(RUN), "--json", "--set", "predictor=stay",
        "--set", "policy={prefetch: predicted}",
    )  # fmt: skip

    assert json.loads(said)["prefetch_issued"] > 0


def test_the_importer_makes_a_trace_and_names_a_bad_line(package: Path, tmp_path: Path) -> None:
    log, out = tmp_path / "log.txt", tmp_path / "log.parquet"
    log.write_text("7 0 3,1\n7 2 0,15\n8 0 3,2\n8 2 4,5\n")
    convert = ["trace", "convert", str(log), str(out), "--from", "one-line"]
    moetier(package, *convert, "--option", "n_experts=16")

    found = json.loads(moetier(package, "trace", "info", str(out), "--json"))
    assert (found["n_moe_layers"], found["top_k"], found["entries"]) == (2, 2, 8)

    log.write_text("7 0 3,1\n7 2\n")
    with pytest.raises(AssertionError, match="line 2: '7 2'; write `TOKEN LAYER ID,ID`"):
        moetier(package, *convert, "--option", "n_experts=16")


def test_the_example_by_hand_prints_what_the_page_says() -> None:
    said = python(ROOT / "src", str(EXAMPLES / "by_hand.py"))

    assert said.count("\n") == 5
    assert f"```text\n{said}```" in (ROOT / "docs" / "timing.md").read_text()
