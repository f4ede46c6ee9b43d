"""Tests of putting published figures beside ours."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moetier.experiments import papers as module
from moetier.experiments.papers import Paper, Row, load_paper, paper_names, reproduce, row
from moetier.experiments.reproduction import document
from moetier.experiments.studies import STUDIES, channel_selection
from moetier.traces.errors import InputError
from moetier.traces.registry import Registry

DOCUMENT = Path(__file__).parents[2] / "docs" / "reproduction.md"
EXACT = ("speculating-experts", "specprefetch", "slicemoe")
"""Papers whose figures depend on nothing but the code: no clock, no data from elsewhere."""

PAPER = Paper.model_validate(
    {
        "title": "T",
        "source": "S",
        "study": "toy",
        "figures": {
            "a": {"published": 2, "low": 1.5, "high": 2.5, "what": "A"},
            "b": {"published": 4, "what": "B", "source": "elsewhere"},
        },
    }
)


@pytest.mark.parametrize("name", paper_names())
def test_every_paper_loads_and_names_a_study(name: str) -> None:
    paper = load_paper(name)

    assert paper.source
    assert paper.study in STUDIES.names()


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask fewer questions where a model runs, and time fewer repeats."""
    whole = channel_selection.ran
    monkeypatch.setattr(channel_selection, "ran", partial(whole, items=11))
    monkeypatch.setattr(channel_selection, "BUDGETS", {"13 %": 0, "17.8 %": 2})
    monkeypatch.setattr(channel_selection, "REPEATS", 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", paper_names())
@pytest.mark.usefixtures("brief")
def test_every_paper_can_be_recomputed(name: str) -> None:
    rows = reproduce(name)

    if name in EXACT:
        text = DOCUMENT.read_text()
        lines = document([{"paper": name, **item.model_dump()} for item in rows]).split("\n")
        assert [line for line in lines if line.startswith("| ") and line not in text] == []

    assert {item.name for item in rows} == set(load_paper(name).figures)
    for item in rows:
        testable = item.kind != "not-testable"
        assert (item.ours is not None) is testable
        assert testable or item.reason
        if item.low is not None and item.high is not None and item.ours is not None:
            assert item.low <= item.ours <= item.high


def test_a_row_holds_the_ratio_of_ours_to_published() -> None:
    found = row(PAPER, "a", 3.0, low=2.5, high=3.5, assumptions=["x"])

    assert found == Row(
        name="a", published=2, ours=3.0, low=2.5, high=3.5, ratio=1.5, kind="prediction",
        what="A", source="S", published_low=1.5, published_high=2.5,
        verdict="inside the band", assumptions=["x"],
    )  # fmt: skip


def test_what_cannot_be_tested_has_no_number_and_a_reason() -> None:
    found = row(PAPER, "b", reason="because")

    assert (found.kind, found.ours, found.ratio) == ("not-testable", None, None)
    assert found.reason == "because"
    assert found.source == "elsewhere"


def test_no_number_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="'b' has no value of ours and no reason why"):
        row(PAPER, "b")


def test_a_fitted_figure_is_called_so() -> None:
    assert row(PAPER, "a", 2.0, kind="fitted").kind == "fitted"


def test_a_study_that_leaves_a_figure_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    studies: Registry[Any] = Registry("study", "moetier.experiments.studies")

    @studies.register("toy")
    def toy(paper: Paper) -> list[Row]:
        """Leave out a figure."""
        return [row(paper, "a", 2.0)]

    monkeypatch.setattr("moetier.experiments.studies.STUDIES", studies)
    monkeypatch.setattr(studies, "_loaded", True)
    monkeypatch.setattr(module, "load_paper", lambda name: PAPER)

    with pytest.raises(InputError, match=r"papers/toy\.yaml: the study leaves out b; return a row"):
        reproduce("toy")


def test_an_unknown_study_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    paper = PAPER.model_copy(update={"study": "speculating-expert"})
    monkeypatch.setattr(module, "load_paper", lambda name: paper)

    with pytest.raises(InputError, match="unknown study 'speculating-expert'; did you mean"):
        reproduce("x")
