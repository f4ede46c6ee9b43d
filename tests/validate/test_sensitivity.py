"""Check that damage to the experts is what it says, is undone, and costs what it should."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from moetier.traces.capture.find import find_moe_layers
from moetier.traces.samples import moe_tiny_path
from moetier.traces.samples.tasks import TASKS, held_out_items
from moetier.validate.accuracy import Difference, Estimate, paired_difference, summarise
from moetier.validate.numerics.groupwise import requantised
from moetier.validate.sensitivity import (
    PERTURBATIONS,
    Row,
    as_json,
    main,
    misrouted,
    perturbation_table,
    reweighted,
    task_table,
)

EXPERTS, TOP_K = 6, 3


class Experts(nn.Module):
    """Stacked experts that report the ids and weights they were given."""

    has_gate = is_concatenated = True
    has_bias = has_post_expert_norm = is_transposed = _is_expert_parallel = False

    def __init__(self) -> None:
        """Draw the weights."""
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 8, 32))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, 4, 32))

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids and weights."""
        return index, weights


class Layer(nn.Module):
    """One layer, with a dense matrix that no perturbation may touch."""

    def __init__(self) -> None:
        """Draw the weights."""
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.experts = Experts()
        self.dense = nn.Linear(32, 32)


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer())


def experts_of(model: nn.Module) -> nn.Module:
    return find_moe_layers(model)[0].experts


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("bits", "nested"), [(4, None), (4, 2), (1, None)])
def test_reweighting_quantises_the_experts_and_nothing_else(bits: int, nested: int | None) -> None:
    model = two_layers()
    before = snapshot(model)
    with reweighted(model, bits, nested):
        inside = snapshot(model)
    after = snapshot(model)

    for name, original in before.items():
        expected = requantised(original, bits, nested) if "experts" in name else original
        assert torch.equal(inside[name], expected)
        assert torch.equal(after[name], original)


def test_weights_are_restored_after_an_error() -> None:
    model = two_layers()
    before = snapshot(model)
    with pytest.raises(KeyError), reweighted(model, bits=1):
        raise KeyError

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_misrouting_draws_distinct_experts_and_keeps_the_weights() -> None:
    model = two_layers()
    experts = experts_of(model)
    hidden, index = torch.zeros(50, 32), torch.zeros(50, TOP_K, dtype=torch.long)
    weights = torch.rand(50, TOP_K)
    with misrouted(model):
        chosen, kept = experts(hidden, index, weights)
    untouched, _ = experts(hidden, index, weights)

    assert torch.equal(kept, weights)
    assert torch.equal(untouched, index)
    assert sorted(set(chosen.flatten().tolist())) == list(range(EXPERTS))
    assert all(len(set(row)) == TOP_K for row in chosen.tolist())


def test_misrouting_is_deterministic() -> None:
    model = two_layers()
    arguments = torch.zeros(9, 32), torch.zeros(9, TOP_K, dtype=torch.long), torch.rand(9, TOP_K)
    chosen = []
    for seed in (1, 1, 2):
        with misrouted(model, seed):
            chosen.append(experts_of(model)(*arguments)[0])

    assert torch.equal(chosen[0], chosen[1])
    assert not torch.equal(chosen[0], chosen[2])


def example_row() -> Row:
    items = held_out_items(1)
    accuracy = summarise(items, [True] * 10 + [False])
    difference = paired_difference([1.0, 1.0], [0.5, 0.5])
    return Row("full", accuracy, Estimate(0.25, 0.125, 11), difference)


def test_the_task_table_labels_finite_tasks() -> None:
    lines = task_table(example_row().accuracy).splitlines()

    assert len(lines) == 2 + len(TASKS) + 1
    assert lines[2] == "| add | 1 | 100.00 ± 0.00 % | yes |"
    assert lines[-2] == "| elem | 1 | 0.00 ± 0.00 % | no: finite table |"
    assert lines[-1] == "| **all** | 11 | 90.91 ± 9.09 % | |"


def test_the_perturbation_table_shows_the_interval() -> None:
    row = perturbation_table([example_row()]).splitlines()[-1]

    assert row == "| full | 90.91 ± 9.09 % | 0.2500 ± 0.1250 | 0.5000 (0.5000 to 0.5000) |"


def test_json_holds_the_estimates() -> None:
    (record,) = json.loads(as_json([example_row()]))

    assert record["perturbation"] == "full"
    assert record["nll"] == {"mean": 0.25, "standard_error": 0.125, "n": 11}
    assert record["nll_rise"]["mean"] == 0.5
    assert record["accuracy"]["by_task"]["elem"]["mean"] == 0.0
    assert list(record["accuracy"]) == ["overall", "by_task"]


@pytest.mark.parametrize("items", ["10", "1299"])
def test_an_impossible_number_of_items_is_refused(
    items: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--items", items])

    assert f"--items {items} is out of range; give 11 to 1298" in capsys.readouterr().err


@pytest.mark.slow
def test_every_serious_perturbation_costs_points(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--items", "110", "--json", "--model", str(moe_tiny_path())])
    rows = {row["perturbation"]: row for row in json.loads(capsys.readouterr().out)}
    points = {name: row["accuracy"]["overall"]["mean"] for name, row in rows.items()}
    rises = {name: Difference(**row["nll_rise"]) for name, row in rows.items()}

    assert status == 0
    assert list(rows) == list(PERTURBATIONS)
    assert rises["full"] == Difference(0.0, 0.0, 0.0, 110)
    for damage in ("random experts", "1-bit experts", "2-bit experts nested in 4"):
        assert points[damage] < points["full"] - 0.05
        assert rises[damage].low > 0
    for damage in ("random experts", "1-bit experts"):
        assert points[damage] < 0.2
    assert points["8-bit experts"] > points["full"] - 0.02


@pytest.mark.slow
def test_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--items", "11"])
    tasks, perturbations = capsys.readouterr().out.strip().split("\n\n")

    assert len(tasks.splitlines()) == 2 + len(TASKS) + 1
    assert len(perturbations.splitlines()) == 2 + len(PERTURBATIONS)
