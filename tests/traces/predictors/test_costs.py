"""What predictors weigh and compute follows from a geometry alone, and agrees with the papers."""

from __future__ import annotations

from typing import Any

import pytest

from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry, load_geometry
from moetier.traces.predictors import PREDICTORS, create
from moetier.traces.predictors.estimator import Estimator

SMALL = Geometry(name="small", n_experts=8, top_k=2, moe_layers=[0, 1, 2, 3], hidden=16)
ARGUMENTS: dict[str, dict[str, Any]] = {"recall-model": {"recall": [0.9, 0.8]}}
QWEN, DEEPSEEK = "qwen3-vl-30b-a3b", "deepseek-vl2-tiny"


@pytest.mark.parametrize(
    ("spec", "model", "published"),
    [
        ({"kind": "low-rank", "rank": 64}, QWEN, 12.952e6),
        ({"kind": "low-rank", "rank": 64}, DEEPSEEK, 1.634e6),
        ("mlp", QWEN, 414.45e6),
        ("mlp", DEEPSEEK, 32.69e6),
        ("linear", QWEN, 24.38e6),
        ("linear", DEEPSEEK, 1.556e6),
    ],
)
def test_published_sizes_are_met_to_the_last_digit(spec: Any, model: str, published: float) -> None:
    digits = len(f"{published / 1e6:g}".partition(".")[2])
    found = create(spec).n_parameters(load_geometry(model))

    assert round(found / 1e6, digits) == round(published / 1e6, digits)


def test_exact_sizes_are_products_of_the_shapes() -> None:
    qwen, deepseek = load_geometry(QWEN), load_geometry(DEEPSEEK)

    assert create("low-rank").n_parameters(qwen) == (47 + 46) * 64 * (2048 + 128)
    assert create("low-rank").n_parameters(deepseek) == (10 + 9) * 64 * (1280 + 64)
    assert create("mlp").n_parameters(qwen) == 93 * (2048**2 + 2048 * 128)
    assert create("linear").n_parameters(deepseek) == 19 * 1280 * 64


def test_the_estimator_of_qwen3_has_the_published_17_million() -> None:
    estimator = create("estimator")
    assert isinstance(estimator, Estimator)
    shapes = estimator.network(load_geometry("qwen3-30b-a3b"))
    matrices = sum(a * b for name, (a, b) in shapes.items() if name != "layer_embedding")

    assert matrices == 2048 * 4096 + 4096 * 2048 + 2048 * 128
    assert round(matrices / 1e6) == 17
    assert shapes["layer_embedding"] == (47, 2048)


@pytest.mark.parametrize("name", PREDICTORS.names())
def test_every_predictor_knows_its_costs(name: str) -> None:
    predictor = create({"kind": name, **ARGUMENTS.get(name, {})})
    entries = predictor.entries(SMALL)

    assert [entry.horizon for entry in entries] == list(predictor.horizons)
    assert all(entry.name == name for entry in entries)
    total = sum(entry.nbytes or 0 for entry in entries)
    assert total == 4 * predictor.n_parameters(SMALL)
    operations = [entry.operations for entry in entries]
    assert all(value is not None and value >= 0 for value in operations)
    assert all(value for value in operations) == (
        predictor.needs == "model" or name == "popularity"
    )


def test_operations_are_the_products_of_the_formula() -> None:
    router = 2 * 16 * 8
    norm = 4 * 16
    vectors = 2 * 2 * 16

    assert create("router-reuse").operations(SMALL, 1) == norm + router
    assert create("default-vector").operations(SMALL, 1) == norm + router + vectors
    assert create({"kind": "low-rank", "rank": 4}).operations(SMALL, 2) == router + 2 * 4 * (16 + 8)
    assert create("linear").operations(SMALL, 1) == router
    assert create("mlp").operations(SMALL, 1) == router + 2 * 16 * 16 + 16
    network = 2 * 16 * (2 * 32 + 8) + 2 * 16 + 32
    assert create("estimator").operations(SMALL, 1) == norm + vectors + network
    correct = create({"kind": "estimator", "correct": True}).operations(SMALL, 1)
    assert correct == norm + vectors + network + router


def test_the_hybrid_costs_the_mean_of_what_its_layers_cost() -> None:
    default = create("default-vector").operations(SMALL, 1)
    estimator = create("estimator").operations(SMALL, 1)
    one = create({"kind": "hybrid", "layers": [0]})

    assert one.operations(SMALL, 1) == (estimator + 2 * default) // 3
    assert create({"kind": "hybrid", "layers": []}).operations(SMALL, 1) == default
    assert create("hybrid").operations(SMALL, 1) == estimator


def test_shared_weights_are_charged_once() -> None:
    predictor = create({"kind": "default-vector", "horizons": [1, 2]})

    assert [entry.nbytes for entry in predictor.entries(SMALL)] == [4 * 3 * 8 * 16, 0]


def test_a_horizon_beyond_the_last_layer_has_no_entry() -> None:
    predictor = create({"kind": "router-reuse", "horizons": [1, 4, 9]})

    assert [entry.horizon for entry in predictor.entries(SMALL)] == [1]


def test_an_unknown_hidden_size_is_said() -> None:
    unknown = SMALL.model_copy(update={"hidden": None})

    with pytest.raises(InputError, match="hidden size of 'small' is unknown"):
        create("linear").entries(unknown)
