"""Tests of the header and the columns it leads to."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from moetier.traces.geometry import Geometry
from moetier.traces.schema import HEADER_KEY, Header, Predictor, Provenance, arrow_schema

GEOMETRY = Geometry(name="small", n_experts=4, top_k=2, moe_layers=[1, 2])
PLAIN = [
    "request", "phase", "step", "position", "layer", "moe_layer", "experts", "weights", "valid",
]  # fmt: skip


def test_optional_columns_appear_only_where_the_header_says_so() -> None:
    bare = Header(geometry=GEOMETRY, provenance=Provenance(kind="synthetic"))
    full = Header(
        geometry=GEOMETRY,
        score_kind="logits",
        predictors=[Predictor(name="reuse", horizon=1), Predictor(name="reuse", horizon=2)],
        recorded_residency=True,
        provenance=Provenance(kind="captured"),
    )

    assert arrow_schema(bare).names == PLAIN
    assert arrow_schema(full).names == [
        *PLAIN, "scores", "predicted_1", "predicted_2", "recorded",
    ]  # fmt: skip


def test_the_header_travels_in_the_metadata() -> None:
    header = Header(
        geometry=GEOMETRY,
        expert_bytes={"bf16": [3, 4]},
        provenance=Provenance(kind="imported", note="µ"),
    )
    text = arrow_schema(header).metadata[HEADER_KEY]

    assert Header.model_validate_json(text) == header


def test_lists_have_the_widths_of_the_geometry() -> None:
    header = Header(geometry=GEOMETRY, score_kind="logits", provenance=Provenance(kind="synthetic"))
    schema = arrow_schema(header)

    assert schema.field("experts").type.list_size == 2
    assert schema.field("scores").type.list_size == 4


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        Header.model_validate(
            {"geometry": GEOMETRY, "provenance": {"kind": "synthetic", "prompt": "hello"}}
        )
