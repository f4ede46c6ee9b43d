"""The dense part reads the bytes, and does the operations, that a simulation counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moetier.sim.machine.work import DenseWork, dense_work
from moetier.traces.batch import DECODE, PREFILL, LayerBatch
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.traces.schema import Header, Provenance
from moetier.validate.machines.dense import Dense, attention_shape


def work_of(geometry: Geometry, weights: str = "bf16", kv_bytes: int = 2) -> DenseWork:
    header = Header(geometry=geometry, provenance=Provenance(kind="synthetic"))
    return dense_work(header, weights, kv_bytes)


def batch_of(layer: int, phase: int, tokens: int, context: int) -> LayerBatch:
    return LayerBatch(0, phase, layer, tokens, context, [])


def counted(work: DenseWork, batch: LayerBatch) -> tuple[int, int]:
    one = [np.array([n]) for n in (batch.layer, batch.phase, batch.n_tokens, batch.context)]
    found = work.of(*one)
    return int(found.ops[0]), int(found.nbytes[0])


LATENT = {"kv_lora": 32, "rope_dim": 8}
SLIDING = {"sliding_window": 16, "attention": ["sliding", "full"]}
FIRST_DENSE = {"moe_layers": [1, 2], "dense_intermediate": 96}


@pytest.mark.parametrize("more", [{}, LATENT, SLIDING, FIRST_DENSE], ids=str)
@pytest.mark.parametrize(
    ("phase", "tokens", "context"), [(DECODE, 1, 300), (DECODE, 3, 120), (PREFILL, 40, 820)]
)
def test_reads_the_bytes_that_are_counted(
    more: dict[str, Any], phase: int, tokens: int, context: int, geometry: Geometry
) -> None:
    geometry = geometry.model_copy(update=more)
    work = work_of(geometry)
    dense = Dense(work, geometry, context=context)
    for layer in range(geometry.n_moe_layers):
        batch = batch_of(layer, phase, tokens, context)
        dense.run(batch, torch.ones(tokens, 64, dtype=torch.bfloat16))
        _, nbytes = counted(work, batch)
        row = 2 * 64  # bytes: matrices have whole rows

        assert nbytes - 2 * row < dense.nbytes(batch) <= nbytes


@pytest.mark.parametrize("layer", [0, 2])  # the last has the head
@pytest.mark.parametrize(("phase", "tokens", "context"), [(DECODE, 1, 300), (DECODE, 4, 400)])
def test_does_the_operations_that_are_counted(
    layer: int, phase: int, tokens: int, context: int, geometry: Geometry
) -> None:
    work = work_of(geometry)
    dense = Dense(work, geometry)
    batch = batch_of(layer, phase, tokens, context)
    with FlopCounterMode(display=False) as counter:
        dense.run(batch, torch.ones(tokens, 64, dtype=torch.bfloat16))
    attention = 4 * 64 * context
    products = sum(
        ops
        for name, ops in counter.get_flop_counts()["Global"].items()
        if "attention" not in str(name)
    )
    ops, _ = counted(work, batch)
    row = 2 * 64 * tokens

    assert ops - attention - 2 * row < products <= ops - attention


def test_the_head_of_a_prefill_is_asked_for_one_token(geometry: Geometry) -> None:
    work = work_of(geometry)
    dense = Dense(work, geometry)
    seen: list[tuple[int, int]] = []
    really = torch.nn.functional.linear

    def watch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append((len(x), len(weight)))
        return really(x, weight)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", watch)
        dense.run(batch_of(2, PREFILL, 5, 15), torch.ones(5, 64, dtype=torch.bfloat16))

    assert seen[1] == (1, geometry.vocab)
    assert seen[0][0] == 5


def test_predictors_are_read_in_decode_only(geometry: Geometry) -> None:
    work = replace(work_of(geometry), decode_bytes=np.array([1280, 1280, -256]))
    dense = Dense(work, geometry)
    for layer, more in enumerate([1280, 1280, -256]):
        step, prompt = batch_of(layer, DECODE, 1, 1), batch_of(layer, PREFILL, 1, 1)

        assert dense.nbytes(step) - dense.nbytes(prompt) == more


@pytest.mark.parametrize(("weights", "dtype"), [("bf16", "bfloat16"), ("q4_0", "bfloat16")])
def test_weights_take_the_bytes_of_their_format(
    weights: str, dtype: str, geometry: Geometry
) -> None:
    work = work_of(geometry, weights)
    dense = Dense(work, geometry, weights)
    batch = batch_of(0, DECODE, 1, 1)

    assert dense.dtype is getattr(torch, dtype)
    assert abs(dense.nbytes(batch) - counted(work, batch)[1]) <= 2 * 128


def test_the_cache_grows_where_more_comes_than_was_said(geometry: Geometry) -> None:
    work = work_of(geometry, kv_bytes=4)
    dense = Dense(work, geometry, context=2)
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    for context in (1, 3, 50, 7):
        batch = batch_of(0, DECODE, 1, context)
        dense.run(batch, x)

        assert abs(dense.nbytes(batch) - counted(work, batch)[1]) <= 2 * 128


def test_a_model_that_does_not_say_how_it_attends_only_multiplies(geometry: Geometry) -> None:
    bare = geometry.model_copy(update={"heads": None, "kv_heads": None, "head_dim": None})

    assert attention_shape(bare) is None

    dense = Dense(work_of(geometry), bare)
    dense.run(batch_of(0, DECODE, 1, 9), torch.ones(1, 64, dtype=torch.bfloat16))

    weights = int(work_of(geometry).weight_bytes[0])
    assert weights - 128 < dense.nbytes(batch_of(0, DECODE, 1, 9)) <= weights


def test_numbers_of_the_cache_that_torch_has_no_type_for_are_refused(geometry: Geometry) -> None:
    with pytest.raises(InputError, match="kv_bytes: numbers of the key/value cache have 1 bytes"):
        Dense(work_of(geometry, kv_bytes=1), geometry)


def test_a_model_without_a_width_is_refused(geometry: Geometry) -> None:
    with pytest.raises(InputError, match="the hidden width of 'small' is unknown"):
        Dense(work_of(geometry), geometry.model_copy(update={"hidden": None}))


def test_weights_beyond_the_memory_are_refused(geometry: Geometry) -> None:
    huge = replace(work_of(geometry), weight_bytes=np.full(3, 1 << 48))
    with pytest.raises(InputError, match=r"dense weights: .* are needed"):
        Dense(huge, geometry)
