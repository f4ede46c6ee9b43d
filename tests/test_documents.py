"""This module tests that the documents say what is there: links, metrics and YAML."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from moetier.experiments.config import RunConfig
from moetier.experiments.sweep import SweepConfig
from moetier.sim.metrics import Metrics

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(ROOT.glob("*.md"))  # those of docs/ are checked when the site is built


def blocks(document: str, language: str) -> list[str]:
    """Return the fenced blocks of *language* in a document."""
    text = (ROOT / document).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text())

    assert [link for link in links if not (document.parent / link).exists()] == []


def test_every_metric_is_documented_and_every_documented_metric_exists() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"`([a-z0-9_]+)`", text))

    missing = set(Metrics().summary()) - documented

    assert missing == set()


def test_the_yaml_of_the_readme_is_a_run_and_a_sweep() -> None:
    run_text, sweep_text, live_text = blocks("README.md", "yaml")

    assert RunConfig.model_validate(yaml.safe_load(run_text)).hardware == "rtx-4090"
    assert SweepConfig.model_validate(yaml.safe_load(sweep_text)).name == "cache-size"
    assert RunConfig.model_validate(yaml.safe_load(live_text)).live == "moe-tiny"
