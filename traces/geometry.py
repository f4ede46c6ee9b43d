"""This module describes a model's shape: the numbers that decide bytes and operations."""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from moetier.traces.errors import InputError, nearest

AttentionKind = Literal["full", "sliding", "linear"]


class Geometry(BaseModel):
    """A model's shape. What is not known is None, and a run that needs it says so."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # of the model
    n_experts: int = Field(ge=1)  # routed ones, per MoE layer
    top_k: int = Field(ge=1)  # of them, per token
    moe_layers: list[int] = Field(min_length=1)  # model-layer index of each MoE layer
    n_layers: int | None = Field(default=None, ge=1)  # of the model, MoE or not
    hidden: int | None = Field(default=None, ge=1)  # width of the residual stream
    moe_intermediate: int | None = Field(default=None, ge=1)  # inner width of one expert
    expert_matrices: int = Field(default=3, ge=1)  # 3: gate, up, down; 2: no gate
    expert_biases: bool = False  # does every expert matrix have a bias?
    shared_intermediate: int = Field(default=0, ge=0)  # all shared experts together
    dense_intermediate: int | None = None  # MLP of the layers without routed experts
    heads: int | None = None  # of attention, for queries
    kv_heads: int | None = None  # for keys and values
    head_dim: int | None = None  # width of each
    qk_norm: bool = False  # are queries and keys normalised per head?
    kv_lora: int | None = None  # multi-head latent attention: rank of the joint key/value
    rope_dim: int | None = None  # and the width of its rotary part
    vocab: int | None = None  # rows of the output head
    tied_embeddings: bool = False  # is the output head the embedding table?
    sliding_window: int | None = None  # tokens that sliding attention sees
    attention: list[AttentionKind] | None = None  # repeating pattern over the layers
    norm_topk: bool | None = None  # are the k gate weights renormalised?
    unverified: list[str] = Field(default_factory=list)  # keys that were guessed
    source: str = "unverified"  # where the numbers were read

    @property
    def n_moe_layers(self) -> int:
        """Return how many layers have routed experts."""
        return len(self.moe_layers)

    @property
    def expert_weights(self) -> int:
        """Return the number of weights of one routed expert."""
        if self.hidden is None or self.moe_intermediate is None:
            raise InputError(
                f"the size of an expert of '{self.name}' is unknown",
                way_out="name a published geometry with `model:`, or record expert_bytes",
            )
        return self.expert_matrices * self.hidden * self.moe_intermediate

    def attention_of(self, layer: int) -> AttentionKind:
        """Return the kind of attention of model layer *layer*."""
        return "full" if not self.attention else self.attention[layer % len(self.attention)]

    def first_layers(self, count: int) -> Geometry:
        """Return the model that ends after its first *count* MoE layers.

        Raises:
            InputError: If it has fewer.
        """
        if not 1 <= count <= self.n_moe_layers:
            raise InputError(
                f"{count} MoE layers of '{self.name}', which has {self.n_moe_layers}",
                where="layers",
                way_out=f"give 1 to {self.n_moe_layers}",
            )
        if count == self.n_moe_layers:
            return self
        kept = self.moe_layers[:count]
        n_layers = None if self.n_layers is None else kept[-1] + 1
        return self.model_copy(update={"moe_layers": kept, "n_layers": n_layers})

    @model_validator(mode="after")
    def _check(self) -> Geometry:
        if self.top_k > self.n_experts:
            raise ValueError(f"top_k {self.top_k} is above n_experts {self.n_experts}")
        if self.moe_layers != sorted(set(self.moe_layers)):
            raise ValueError("moe_layers must be ascending and without repeats")
        if self.n_layers is not None and self.moe_layers[-1] >= self.n_layers:
            raise ValueError(f"MoE layer {self.moe_layers[-1]} is beyond n_layers {self.n_layers}")
        return self


def published() -> list[str]:
    """Return the names of the published geometries, sorted."""
    folder = files("moetier.traces.models")
    return sorted(
        f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")
    )


@lru_cache
def load_geometry(name: str) -> Geometry:
    """Return the published geometry *name*; raise `InputError` when there is none.

    A YAML may write `moe_layers: {first: 1, count: 26}` in place of the list.
    """
    if name not in published():
        raise InputError(
            f"unknown model '{name}'",
            way_out=f"{nearest(name, published())}known: {', '.join(published())}",
        )
    file = files("moetier.traces.models") / f"{name}.yaml"
    data: dict[str, Any] = yaml.safe_load(file.read_text())
    layers = data.get("moe_layers")
    if isinstance(layers, dict):
        data["moe_layers"] = [layers["first"] + i for i in range(layers["count"])]
    try:
        return Geometry(**data)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{first['loc']}: {first['msg']}", where=f"{name}.yaml") from None
