"""This module defines a trace: its header and the columns of its rows.

A trace is one Parquet file. Each row is one token at one MoE layer; the header is JSON in the
file's schema metadata. Rows are ordered by step, then by MoE layer, then by token; all rows with
the same step and layer form one batch.
"""

from __future__ import annotations

from typing import Literal

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field

from moetier.traces.geometry import Geometry

VERSION = 1
HEADER_KEY = b"moetier"

ScoreKind = Literal["logits", "probabilities", "sigmoid", "none", "unknown"]


class Provenance(BaseModel):
    """Where a trace came from. It never holds prompt text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["captured", "imported", "synthetic"]  # how it came about
    model: str | None = None  # its name
    model_fingerprint: str | None = None  # sha256 over config and weights
    tokenizer: str | None = None  # its class
    prompts_sha256: str | None = None  # in place of the prompts
    dtype: str | None = None  # in which the model computed
    seed: int | None = None  # of what was drawn
    versions: dict[str, str] = Field(default_factory=dict)  # software -> version
    importer: str | None = None  # its name, of `moetier list importers`
    note: str | None = None  # for people


class Predictor(BaseModel):
    """A predictor whose scores a trace carries, in the column `predicted_<horizon>`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # of `moetier list predictors`
    horizon: int = Field(ge=1)  # how many MoE layers ahead it looks
    nbytes: int | None = None  # of its own weights, charged to the fastest tier
    operations: int | None = None  # per token and layer


class Header(BaseModel):
    """Everything about a trace that is not routing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = VERSION  # of this format
    geometry: Geometry  # the model's shape
    weights: str | None = None  # the format the traced model was stored in, a key of `expert_bytes`
    expert_bytes: dict[str, list[int]] = {}  # format -> bytes of one whole expert, per MoE layer
    slice_bytes: dict[str, list[list[int]]] = {}  # format -> of each slice of one, per MoE layer
    dense_bytes: list[int] | None = None  # per MoE layer: everything that is not a routed expert
    dense_layer_bytes: list[int] | None = None  # of each model layer without routed experts
    score_kind: ScoreKind = "none"  # what `scores` and `predicted_*` hold
    predictors: list[Predictor] = Field(default_factory=list)  # whose scores are in columns
    recorded_residency: bool = False  # is there a column `recorded`?
    unknown: list[str] = Field(default_factory=list)  # what the source did not say
    provenance: Provenance  # where it came from


def arrow_schema(header: Header) -> pa.Schema:
    """Return the columns of a trace with *header*; optional ones appear only where it says so."""
    k, n = header.geometry.top_k, header.geometry.n_experts
    fields = [
        pa.field("request", pa.int32()),
        pa.field("phase", pa.int8()),
        pa.field("step", pa.int32()),
        pa.field("position", pa.int32()),
        pa.field("layer", pa.int16()),
        pa.field("moe_layer", pa.int16()),
        pa.field("experts", pa.list_(pa.int16(), k)),
        pa.field("weights", pa.list_(pa.float32(), k)),
        pa.field("valid", pa.bool_()),
    ]
    if header.score_kind != "none":
        fields.append(pa.field("scores", pa.list_(pa.float32(), n)))
    fields += [
        pa.field(f"predicted_{item.horizon}", pa.list_(pa.float32(), n))
        for item in header.predictors
    ]
    if header.recorded_residency:
        fields.append(pa.field("recorded", pa.list_(pa.int8(), k)))
    return pa.schema(fields, metadata={HEADER_KEY: header.model_dump_json().encode()})
