"""Tests of verdicts, and of the document that holds published figures beside ours."""

from __future__ import annotations

from typing import Any

import pytest

from moetier.experiments.papers import Figure, judge
from moetier.experiments.reproduction import document


def figure(**given: Any) -> Figure:
    return Figure.model_validate({"published": 2.0, "what": "W"} | given)


@pytest.mark.parametrize(
    ("about", "ours", "low", "high", "verdict"),
    [
        (figure(), 2.1, 1.5, 2.0, "inside the band"),
        (figure(low=1.5, high=2.5), 1.5, None, None, "inside the published range"),
        (figure(), 2.0, None, None, "reproduced within 0.1%"),
        (figure(), 2.19, None, None, "reproduced within 9.5%"),
        (figure(), 2.21, None, None, "not reproduced, off by 10%"),
        (figure(low=1.5, high=2.5), 2.7, None, None, "reproduced within 8.0%"),
        (figure(neutral=1), 1.1, None, None, "same sign, another size"),
        (figure(neutral=1), 0.9, None, None, "not reproduced"),
        (figure(neutral=1), 1.0, None, None, "not reproduced"),
        (figure(published=-0.3, neutral=0), 0.1, None, None, "not reproduced"),
        (figure(published=-0.3, neutral=0), -0.1, None, None, "same sign, another size"),
        (figure(bound="above"), 2.0, None, None, "above it, as it must be"),
        (figure(bound="above"), 1.9, None, None, "not above it"),
        (figure(bound="below"), 2.1, None, None, "not below it"),
    ],
)
def test_a_verdict_is_that_of_the_numbers(
    about: Figure, ours: float, low: float | None, high: float | None, verdict: str
) -> None:
    assert judge(about, ours, low, high) == verdict


def test_what_was_fitted_is_no_success() -> None:
    assert judge(figure(), 2.0, None, None, "fitted") == "fitted to it"


def rows() -> list[dict[str, Any]]:
    common = {"paper": "slicemoe", "what": "a | b", "source": "S", "reason": None, "ratio": 0.5}
    ends = {"low": None, "high": None, "published_low": None, "published_high": None}
    first = {"name": "x", "published": 2.0, "ours": 1.0, "verdict": "same", "assumptions": ["A"]}
    second = {"name": "y", "published": 3.0, "ours": None, "verdict": "", "assumptions": ["A"]}
    return [
        common | ends | first | {"low": 0.9, "high": 1.1},
        common | ends | second | {"ratio": None, "reason": "no GPU"},
    ]


def test_a_document_has_a_table_for_each_paper() -> None:
    found = document(rows())

    assert "| x | 2 | 1 (0.9 to 1.1) | 0.5 | same | a \\| b |" in found
    assert "| y | 3 |  |  | not testable here: no GPU | a \\| b |" in found
    assert found.count("- assumed: A") == 1
    assert "## SliceMoE: bit-sliced expert caching" in found
