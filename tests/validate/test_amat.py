"""Check the AMAT command: every variant is measured, and the model is left as it was."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moetier.traces.formats import bit_slice_bytes
from moetier.traces.geometry import load_geometry
from moetier.traces.samples import moe_tiny_path
from moetier.traces.samples.tasks import TASKS, held_out_items
from moetier.validate.accuracy import Difference, Estimate, paired_difference, summarise
from moetier.validate.amat import SPLITS, main, measure
from moetier.validate.amat_report import (
    Comparison,
    Report,
    Storage,
    WeightError,
    weight_error,
)
from moetier.validate.numerics.variants import VARIANTS
from moetier.validate.sensitivity import Row


def example() -> Report:
    items = held_out_items(1)
    accuracy = summarise(items, [True] * 10 + [False])
    rise = paired_difference([1.0, 1.0], [0.5, 0.5])
    return Report(
        rows=[Row("full", accuracy, Estimate(0.25, 0.125, 11), rise)],
        errors=[WeightError("8/4 independent", 0.0123, -0.5, 0.25, 0.75)],
        comparisons=[Comparison("4/2", Difference(0.5, 0.25, 0.75, 11), rise)],
        storage=[Storage("8/4", 28416, 25344, (28417, 25345), 13_840_000, 0.5, 0.25)],
    )


def test_the_report_has_a_table_of_each_kind() -> None:
    answers, comparisons, errors, storage = (
        table.splitlines() for table in example().text().split("\n\n")
    )

    assert answers[-1].startswith("| full | 90.91 ± 9.09 % |")
    assert comparisons[-1] == "| 4/2 | 50.00 (25.00 to 75.00) | 0.5000 (0.5000 to 0.5000) |"
    assert errors[-1] == "| 8/4 independent | 1.23 % | -50.0 % | 25.0 % | 75.0 % |"
    assert storage[-1] == (
        "| 8/4 | 28,416 B | 25,344 B | 28,417 B, 25,345 B | 13.84 MB | 0.50 s | 0.25 s |"
    )
    for table in (answers, comparisons, errors, storage):
        assert len({line.count("|") for line in table}) == 1


def test_json_holds_the_whole_report() -> None:
    found = json.loads(example().json())

    assert list(found) == ["rows", "errors", "comparisons", "storage"]
    assert found["rows"][0]["nll"]["mean"] == 0.25
    assert found["comparisons"][0]["exact_match"]["low"] == 0.25
    assert found["storage"][0]["charged_bytes"] == [28417, 25345]
    assert found["errors"][0]["zeros"] == 0.25


def test_the_error_of_weights_is_over_all_tensors() -> None:
    tensors = [
        (torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0]), torch.tensor([2.0, 1.0])),
        (torch.tensor([[4.0, 0.0]]), torch.tensor([[2.0, 0.0]]), None),
    ]
    # errors -1, 0, 2, 0; weights 1, 1, 2, 0; times inputs 0 and 1 stand for 2 and 1
    assert weight_error("x", tensors) == WeightError("x", 5 / 6, 1 / 4, 2 / 4, 1 / 5)


@pytest.mark.parametrize("items", ["10", "1299"])
def test_an_impossible_number_of_items_is_refused(
    items: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--items", items])

    assert f"--items {items} is out of range; give 11 to 1298" in capsys.readouterr().err


@pytest.mark.slow
def test_a_group_that_does_not_divide_is_refused_without_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--items", "11", "--group", "48"])

    assert "rows of 128 weights have no whole number of groups of 48" in capsys.readouterr().err


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(moe_tiny_path(), dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(moe_tiny_path())


@pytest.mark.slow
def test_without_its_zero_point_a_slice_is_worthless(tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen: list[str] = []
    report = measure(model, tokenizer, held_out_items(5), advance=seen.append)
    points = {row.perturbation: row.accuracy.overall.mean for row in report.rows}
    errors = {row.name: row for row in report.errors}

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert seen == list(points) == list(errors)
    assert len(points) == 1 + len(SPLITS) * len(VARIANTS)
    assert errors["full"] == WeightError("full", 0, 0, errors["full"].zeros, 1)
    for high, low in SPLITS:
        split = f"{high}/{low}"
        nested = points[f"{split} MSB slice (AMAT)"]
        assert points["full"] >= points[f"{split} both slices"] > nested - 0.02
        for ablation in ("symmetric", "zero untouched", "zero exact"):
            assert points[f"{split} {ablation}"] < 0.1 < nested - 0.4
        assert (
            errors[f"{split} both slices"].squared
            < errors[f"{split} independent"].squared
            < errors[f"{split} MSB slice (AMAT)"].squared
        )
    assert report.comparisons[2].nll.high < 0
    assert errors["4/2 independent"].kept < 0.6 < 0.9 < errors["4/2 MSB slice (AMAT)"].kept < 1
    assert points["4/2 MSB slice (AMAT)"] < points["full"] - 0.1


@pytest.mark.slow
def test_the_command_prints_what_is_packed_and_charged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = main(["--items", str(len(TASKS)), "--json", "--group", "64"])
    storage = json.loads(capsys.readouterr().out)["storage"]
    geometry = load_geometry("moe-tiny")

    assert status == 0
    for row, (high, low) in zip(storage, SPLITS, strict=True):
        charged = bit_slice_bytes(geometry, high, low, group=64)
        assert (row["msb_bytes"], row["lsb_bytes"]) == charged == tuple(row["charged_bytes"])
        assert row["file_bytes"] > 8 * 32 * sum(charged)
        assert row["build_s"] > 0 < row["read_s"]
