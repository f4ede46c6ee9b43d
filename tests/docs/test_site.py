"""Tests of the documentation site: it builds without a warning, and its reference is complete."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, Field

from moetier.experiments.config import RunConfig
from moetier.traces.schema import Header

ROOT = Path(__file__).parents[2]

pytest.importorskip("mkdocs", reason="needs the package 'mkdocs-material'")
Validator = pytest.importorskip("jsonschema").Draft202012Validator


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """The hook that writes the reference pages."""
    path = ROOT / "scripts" / "docs_reference.py"
    spec = importlib.util.spec_from_file_location("docs_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning, such as a link that leads nowhere, ends the build."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_every_page_is_there(site: Path) -> None:
    nav = re.findall(r"\b([\w/-]+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)

    assert len(nav) > 20
    assert [name for name in nav if not (site / f"{name}.html").is_file()] == []


@pytest.mark.slow
def test_no_page_asks_for_anything_from_elsewhere(site: Path) -> None:
    asked = {
        link
        for page in site.rglob("*.html")
        for link in re.findall(
            r'<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="(https?:[^"]+)"', page.read_text()
        )
    }

    assert asked == set()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_open_as_files_in_a_browser_and_stay_within_a_phone(
    scheme: str, site: Path, chromium: Any
) -> None:
    context = chromium.new_context(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    said: list[str] = []
    asked: list[str] = []
    wide = []
    page = context.new_page()
    page.on("console", lambda message: said.append(f"{page.url}: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"{page.url}: {error}"))
    page.on("request", lambda request: asked.append(request.url))
    pages = [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    for path in pages:
        page.goto(path.as_uri())
        if not page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"):
            wide.append(path.name)
    context.close()

    assert len(pages) > 25
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert wide == []


@pytest.mark.slow
def test_the_json_schemas_take_what_the_program_takes(site: Path) -> None:
    schema = json.loads((site / "schemas" / "run.json").read_text())

    assert set(schema["properties"]) == set(RunConfig.model_fields)
    assert schema["required"] == ["hardware"]
    assert schema["additionalProperties"] is False


def test_the_json_schemas_take_every_file_that_comes_along(reference: ModuleType) -> None:
    files = {"run": [ROOT / "docs" / "examples" / "tutorial-one.yaml"]}
    files["hardware"] = sorted(ROOT.glob("hw_profiles/*.yaml"))
    kinds = {"sweep": "sweep", "space": "search", "trials": "search", "policies": "validate"}
    for path in sorted(ROOT.glob("experiments/configs/*.yaml")):
        named = [kind for key, kind in kinds.items() if key in yaml.safe_load(path.read_text())]
        files.setdefault(named[0] if named else "run", []).append(path)

    assert set(files) == set(reference.SCHEMAS)
    for kind, paths in files.items():
        schema = json.loads(reference.json_schema(kind))
        Validator.check_schema(schema)
        for path in paths:
            errors = [e.message for e in Validator(schema).iter_errors(read(path))]
            assert errors == [], path
            assert not Validator(schema).is_valid({**read(path), "unheard": 1})


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_a_json_schema_wants_units(reference: ModuleType) -> None:
    validator = Validator(json.loads(reference.json_schema("hardware")))
    profile = read(ROOT / "docs" / "examples" / "small-board.yaml")

    assert validator.is_valid(profile)
    profile["tiers"]["dram"]["capacity"] = 8
    assert not validator.is_valid(profile)


@pytest.mark.parametrize("name", ["run", "sweep", "search", "validate", "hardware", "trace"])
def test_every_key_has_a_meaning(name: str, reference: ModuleType) -> None:
    model = Header if name == "trace" else reference.SCHEMAS[name][0]
    unsaid = []
    for block in reference._blocks(model, {model: ""}):
        said = reference.comments(block).keys() | set(re.findall(r"\*(\w+)\*", block.__doc__ or ""))
        unsaid += [f"{block.__name__}.{key}" for key in block.model_fields if key not in said]

    assert [key for key in unsaid if not key.endswith(".source")] == []


def test_a_comment_belongs_to_the_field_that_it_stands_beside(reference: ModuleType) -> None:
    assert reference.comments(Example) == {"plain": "of no use", "long": "after the bracket"}


def test_a_table_shows_types_and_defaults_as_yaml_has_them(reference: ModuleType) -> None:
    page = reference.schema_page("run")

    assert "| `hardware` | text | required |" in page
    assert "| `overlap` | true or false | `false` |" in page
    assert "| `policy` | text or mapping |" in page
    assert "## machine" in page
    assert "| `latency` | number with its unit | `0` |" in reference.schema_page("hardware")


def test_the_page_of_a_trace_has_its_columns_and_nothing_else(reference: ModuleType) -> None:
    page = reference.trace_page()
    columns = re.findall(r"^\| `(\w+)` \|", page.partition("## Header")[0], re.MULTILINE)

    assert columns == list(reference.COLUMNS)
    assert "| `experts` | list of top-k int16 |" in page
    assert "| `scores` | list of E float |" in page
    assert "| `moe_layers` | list of number | required |" in page


def test_commands_and_parts_are_all_listed(reference: ModuleType) -> None:
    commands, parts = reference.cli_page(), reference.parts_page()

    for command in ("simulate", "trace info", "report"):
        assert f"\n## moetier {command}\n" in commands
    assert "| `--jobs` | number | `1` | Processes; -1 for one per core. |" in commands
    for part in ("belady", "slicemoe", "rtx-4090", "olmoe-1b-7b", "router-reuse", "vllm"):
        assert f"| `{part}` |" in parts


class Example(BaseModel):
    """A schema to read comments of."""

    plain: int = 0  # of no use
    bare: int = 0
    long: dict[str, int] = Field(
        default_factory=dict,
    )  # after the bracket
