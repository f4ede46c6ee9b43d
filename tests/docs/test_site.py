"""Tests of the documentation site: it builds without a warning, and its reference is complete."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from pydantic import BaseModel

from moetier.experiments.config import RunConfig

ROOT = Path(__file__).parents[2]

pytest.importorskip("mkdocs", reason="needs the package 'mkdocs-material'")


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
def test_the_json_schemas_take_what_the_program_takes(site: Path) -> None:
    schema = json.loads((site / "schemas" / "run.json").read_text())

    assert set(schema["properties"]) == set(RunConfig.model_fields)
    assert schema["required"] == ["hardware"]
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("name", ["run", "sweep", "search", "validate", "hardware"])
def test_every_key_has_a_meaning(name: str, reference: ModuleType) -> None:
    model = reference.SCHEMAS[name][0]
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
    long: dict[str, int] = dict(  # noqa: C408
        a=1,
    )  # after the bracket
