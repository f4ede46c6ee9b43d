"""Tests that what the pages tell a reader to type is there: commands, overrides, scripts, YAML."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from pydantic import BaseModel, ValidationError

from moetier.experiments.cli import app
from moetier.experiments.config import RunConfig, load_run
from moetier.experiments.search_config import SearchConfig, load_search
from moetier.experiments.sweep import SweepConfig, load_sweep
from moetier.experiments.validation_config import ValidateConfig, load_validation
from moetier.sim.hardware import Compute, Profile
from moetier.sim.policy.compose import compose
from moetier.sim.warnings import limitations, modelled

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
SCHEMAS: list[type[BaseModel]] = [RunConfig, SweepConfig, SearchConfig, ValidateConfig, Profile]
LOAD: dict[str, Callable[[Path, list[str]], Any]] = {
    "simulate": load_run,
    "sweep": load_sweep,
    "search": load_search,
    "validate": load_validation,
}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def parsed(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the command that *words* call, and its parameters; a usage error is raised."""
    command: Any = typer.main.get_command(app)
    path: list[str] = []
    while hasattr(command, "commands"):
        path, words = [*path, words[0]], words[1:]
        command = command.commands[path[-1]]
    return path, command.make_context(" ".join(path), list(words)).params


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go where a reader is who has saved each page's files: `docs/examples`, and a calibration."""
    for example in (ROOT / "docs" / "examples").iterdir():
        (tmp_path / example.name).symlink_to(example)
    (tmp_path / "here.yaml").symlink_to(ROOT / "hw_profiles" / "phone-ufs4.yaml")
    monkeypatch.chdir(tmp_path)


@each_page
@pytest.mark.usefixtures("reader")
def test_every_command_is_one_and_takes_the_options(
    page: Path, commands_of: Callable[[Path], list[list[str]]]
) -> None:
    for words in commands_of(page):
        path, parameters = parsed(words)
        config = ROOT / str(parameters.get("config"))
        if path[0] in LOAD and config.is_file():
            overrides = [installed(text) for text in parameters["set_"] or []]

            assert LOAD[path[0]](config, overrides)


def installed(override: str) -> str:
    """Return *override* without what a page adds; `test_examples` really adds it."""
    return override.replace("=mru", "=lru").replace("=my-moe", "=moe-small")


def test_a_command_that_is_none_is_found() -> None:
    with pytest.raises(KeyError):
        parsed(["simulat", "x.yaml"])
    with pytest.raises(Exception, match="No such option"):
        parsed(["simulate", "x.yaml", "--jason"])


@each_page
def test_every_command_named_in_a_sentence_exists(page: Path) -> None:
    for span in re.findall(r"`moetier ([^`]+)`", page.read_text()):
        command: Any = typer.main.get_command(app)
        for word in shlex.split(span):
            if not hasattr(command, "commands"):
                if word.startswith("-"):
                    name = word.split("=")[0]
                    assert any(name in p.opts for p in command.params), f"`{name}` in `{span}`"
                continue
            if re.fullmatch(r"[A-Z|…]+|.*\|.*", word):
                break  # `trace info|validate`
            assert word in command.commands, f"`moetier {span}`"
            command = command.commands[word]


@each_page
def test_scripts_modules_configs_and_extras_exist(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"\b(?:scripts|experiments/configs|traces/samples)/[\w./-]*\w", text)
    modules = re.findall(r"python3? -m (moetier[\w.]+)", text)
    extras = {
        extra
        for group in re.findall(r"(?:moetier|\.)\[([\w,-]+)\]'", text)
        for extra in group.split(",")
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert [name for name in named if not (ROOT / name).exists()] == []
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    assert extras <= set(project["optional-dependencies"])


@each_page
def test_every_yaml_block_is_one_that_a_command_reads(page: Path) -> None:
    for text in re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        if text.startswith("--8<--"):
            continue  # a file of docs/examples, tested as a file
        block = yaml.safe_load(text)
        if set(block) == {"compute"}:  # a piece of a profile
            for processor in block["compute"].values():
                assert Compute.model_validate({"source": "a page", **processor}).experts
            continue

        assert any(takes(schema, block) for schema in SCHEMAS), text


def takes(schema: type[BaseModel], block: object) -> bool:
    try:
        schema.model_validate(block)
    except ValidationError:
        return False
    return True


def test_every_example_is_on_a_page() -> None:
    shown = "".join(page.read_text() for page in PAGES)
    examples = sorted(path.name for path in (ROOT / "docs" / "examples").iterdir() if path.suffix)

    assert len(examples) >= 8
    assert [name for name in examples if f'--8<-- "examples/{name}"' not in shown] == []


@each_page
def test_every_policy_in_a_sentence_is_one(page: Path) -> None:
    for text in re.findall(r"`(policy: \{[^`…]+\})`", page.read_text()):
        assert compose(yaml.safe_load(text)["policy"]).parts, text


def test_all_that_a_run_assumes_is_explained() -> None:
    page = (ROOT / "docs" / "not-modelled.md").read_text()
    explained = re.findall(r"^\| `([^`]+)` \| ", page, re.MULTILINE)
    said = sentences(inspect.getsource(limitations)) | sentences(inspect.getsource(modelled))
    sources = [*ROOT.glob("sim/**/*.py"), *ROOT.glob("experiments/*.py")]
    anywhere = "\n".join(set().union(*(literals(path.read_text()) for path in sources)))

    assert len(said) >= 10
    assert [text for text in said if not any(words in text for words in explained)] == []
    assert [words for words in explained if words not in anywhere] == []


def sentences(source: str) -> set[str]:
    """Return the texts that *source* appends to a list or starts one with, values left out."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "append":
            found.add(spelled(node.args[0]))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
            found |= {spelled(item) for item in node.value.elts}
    return found


def literals(source: str) -> set[str]:
    """Return every text in *source*, values left out."""
    nodes = ast.walk(ast.parse(source))
    return {spelled(n) for n in nodes if isinstance(n, ast.JoinedStr | ast.Constant)}


def spelled(node: ast.AST) -> str:
    pieces = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in pieces)
