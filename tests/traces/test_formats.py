"""Tests of weight formats against published and recorded sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moetier.traces.errors import InputError
from moetier.traces.formats import (
    BLOCKS,
    FORMATS,
    bit_slice_bytes,
    dense_bytes,
    dense_layer_bytes,
    embedding_bytes,
    expert_bytes,
    head_bytes,
    matrix_bytes,
    stored_expert_bytes,
)
from moetier.traces.geometry import Geometry, load_geometry, published
from moetier.traces.importers import IMPORTERS
from moetier.traces.schema import Header, Provenance

MIB, GIB = 1 << 20, 1 << 30


def store(name: str, weights: str) -> int:
    geometry = load_geometry(name)
    return geometry.n_experts * sum(expert_bytes(geometry, weights))


def header(geometry: Geometry, **more: Any) -> Header:
    return Header(geometry=geometry, provenance=Provenance(kind="synthetic"), **more)


def test_bits_per_weight() -> None:
    bits = {kind: matrix_bytes(1, 1024, kind) * 8 / 1024 for kind in ("q4_0", "mxfp4", "q6_k")}

    assert bits == {"q4_0": 4.5, "mxfp4": 4.25, "q6_k": 6.5625}


def test_a_row_is_rounded_up_to_whole_blocks() -> None:
    assert matrix_bytes(3, 33, "q4_0") == 3 * 2 * 18


@pytest.mark.parametrize(("kind", "stands_in"), [("q4_k", "q5_0"), ("q6_k", "q8_0")])
def test_rows_that_no_k_block_fits_fall_back(kind: str, stands_in: str) -> None:
    assert matrix_bytes(5, 1408, kind) == matrix_bytes(5, 1408, stands_in)
    assert matrix_bytes(5, 1536, kind) != matrix_bytes(5, 1536, stands_in)


def test_deepseek_vl2_tiny_has_the_published_sizes() -> None:
    # SpecPrefetch (arXiv 2607.24787): 1.94 MB an expert, 1.36 GB the store
    assert expert_bytes(load_geometry("deepseek-vl2-tiny"), "q4_0") == [1_935_360] * 11
    assert store("deepseek-vl2-tiny", "q4_0") == 1_362_493_440


@pytest.mark.parametrize(("name", "gib"), [("qwen3-30b-a3b", 54.0), ("gpt-oss-120b", 213.6)])
def test_bf16_stores_have_the_published_sizes(name: str, gib: float) -> None:
    # Speculating Experts (arXiv 2603.19289), table 2
    assert round(store(name, "bf16") / GIB, 1) == gib


def test_the_dense_part_has_the_published_size() -> None:
    # the same table: about 3 GiB beside the experts of Qwen3-30B-A3B, about 4 of GPT-OSS-120B
    sizes = []
    for name in ("qwen3-30b-a3b", "gpt-oss-120b"):
        geometry = load_geometry(name)
        dense = sum(dense_bytes(geometry, "bf16")) + embedding_bytes(geometry, "bf16")
        sizes.append(round(dense / GIB))

    assert sizes == [3, 4]


def test_q4_k_m_gives_larger_experts_where_llama_cpp_does() -> None:
    sizes = expert_bytes(load_geometry("qwen3-30b-a3b"), "q4_k_m")
    large = [layer for layer, size in enumerate(sizes) if size == 3_059_712]

    assert set(sizes) == {3_059_712, 2_654_208}
    assert large == [*range(6), *range(8, 42, 3), *range(42, 48)]


def test_q4_k_m_gives_every_byte_of_a_recorded_model(data: Path, tmp_path: Path) -> None:
    source = data / "phone-qwen3-30b-a3b" / "route.csv"
    recorded = IMPORTERS.create("bigmoeonedge", {"source": source, "out": tmp_path / "t.parquet"})
    geometry = load_geometry("qwen3-30b-a3b")

    assert expert_bytes(geometry, "q4_k_m") == recorded.expert_bytes["q4_k_m"]
    assert dense_bytes(geometry, "q4_k_m") == recorded.dense_bytes


def test_q4_k_m_counts_model_layers_not_moe_layers() -> None:
    shape: dict[str, Any] = {
        "n_experts": 2,
        "top_k": 1,
        "hidden": 256,
        "moe_intermediate": 256,
        "n_layers": 16,
    }
    late = Geometry(name="late", moe_layers=list(range(2, 16)), **shape)
    every = Geometry(name="every", moe_layers=list(range(16)), **shape)

    assert expert_bytes(late, "q4_k_m") == expert_bytes(every, "q4_k_m")[2:]


def test_mxfp4_is_the_experts_alone() -> None:
    geometry = load_geometry("gpt-oss-20b")

    assert expert_bytes(geometry, "mxfp4") == [3 * 2880 * 2880 * 17 // 32] * 24
    assert dense_bytes(geometry, "mxfp4") == dense_bytes(geometry, "bf16")


def test_dense_bytes_of_a_small_layer_by_hand() -> None:
    geometry = Geometry(
        name="small", n_experts=4, top_k=1, moe_layers=[1], n_layers=2, hidden=64,
        moe_intermediate=32, shared_intermediate=16, dense_intermediate=96, heads=4, kv_heads=2,
        head_dim=8, qk_norm=True, vocab=100,
    )  # fmt: skip
    attention = 64 * (32 + 16 + 16 + 32) + 2 * 8
    norms, router, shared, dense = 2 * 64, 4 * 64, 3 * 64 * 16, 3 * 64 * 96

    assert dense_bytes(geometry, "bf16") == [2 * (attention + norms + router + shared)]
    assert dense_layer_bytes(geometry, "bf16") == [2 * (attention + norms + dense)]
    assert embedding_bytes(geometry, "bf16") == 2 * (2 * 100 * 64 + 64)
    assert head_bytes(geometry, "bf16") == 2 * 100 * 64


def test_latent_attention_by_hand() -> None:
    geometry = Geometry(
        name="latent", n_experts=4, top_k=1, moe_layers=[0], n_layers=1, hidden=64,
        moe_intermediate=32, heads=4, head_dim=8, kv_lora=16, rope_dim=4,
    )  # fmt: skip
    query, down, up, output = 64 * 4 * 12, 64 * 20, 16 * 4 * 16, 32 * 64
    norms, router = 2 * 64 + 16, 4 * 64

    assert dense_bytes(geometry, "bf16") == [2 * (query + down + up + output + norms + router)]


def test_tied_embeddings_are_counted_once() -> None:
    tied = load_geometry("moe-tiny")
    apart = Geometry(**{**tied.model_dump(), "tied_embeddings": False})

    assert embedding_bytes(apart, "bf16") - embedding_bytes(tied, "bf16") == 2 * 64 * 128


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("name", published())
def test_every_format_counts_every_published_model(name: str, weights: str) -> None:
    geometry = load_geometry(name)
    sizes = expert_bytes(geometry, weights)

    assert len(sizes) == geometry.n_moe_layers
    assert {type(size) for size in sizes} == {int}
    assert min(sizes) > 0
    assert max(sizes) <= BLOCKS["f32" if weights == "fp32" else "bf16"][1] * geometry.expert_weights


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda g: expert_bytes(g, "q3"),
            "unknown weights 'q3'; known: bf16, fp16, fp32, int8",
        ),
        (lambda g: expert_bytes(g, "bf16"), "no hidden, moe_intermediate"),
        (lambda g: expert_bytes(g, "q4_k_m"), "no hidden, moe_intermediate, n_layers"),
        (lambda g: dense_bytes(g, "bf16"), "no hidden, heads, head_dim, kv_heads"),
        (lambda g: dense_layer_bytes(g, "bf16"), "no n_layers"),
        (lambda g: embedding_bytes(g, "bf16"), "no hidden, vocab"),
    ],
)
def test_what_is_not_known_is_refused_by_name(call: Any, words: str) -> None:
    unsized = Geometry(name="unsized", n_experts=4, top_k=1, moe_layers=[0])
    with pytest.raises(InputError, match=words):
        call(unsized)


def test_linear_attention_has_no_known_size() -> None:
    geometry = Geometry(**{**load_geometry("moe-tiny").model_dump(), "attention": ["linear"]})
    with pytest.raises(InputError, match="shape of linear attention"):
        dense_bytes(geometry, "bf16")


def test_recorded_bytes_come_before_computed_ones() -> None:
    tiny = load_geometry("moe-tiny")
    recorded = header(tiny, weights="q4_0", expert_bytes={"q4_0": [7] * 8})

    assert stored_expert_bytes(recorded) == ("q4_0", [7] * 8)
    assert stored_expert_bytes(recorded, "q4_0") == ("q4_0", [7] * 8)
    assert stored_expert_bytes(recorded, "bf16") == ("bf16", [3 * 128 * 128 * 2] * 8)


def test_without_recorded_bytes_the_default_is_bf16() -> None:
    tiny = load_geometry("moe-tiny")

    assert stored_expert_bytes(header(tiny))[0] == "bf16"
    assert stored_expert_bytes(header(tiny, weights="int8"))[0] == "int8"
    assert stored_expert_bytes(header(tiny, weights="iq2_xxs"))[0] == "bf16"


def test_bit_slices_of_a_swiglu_expert_add_up() -> None:
    # 3 * 2048 * 1408 weights in groups of 32 with a scale of 16 bits and a zero-point
    geometry = load_geometry("deepseek-v2-lite")
    weights, groups = 8_650_752, 270_336

    assert bit_slice_bytes(geometry, 8, 4) == (
        weights // 2 + groups // 2 + 2 * groups,
        weights // 2 + groups // 2,
    )
    assert bit_slice_bytes(geometry, 6, 3) == (
        (weights + groups) * 3 // 8 + 2 * groups,
        (weights + groups) * 3 // 8,
    )


def test_bit_slices_hold_biases_in_the_msb_slice() -> None:
    geometry = load_geometry("gpt-oss-20b")
    bare = Geometry(**{**geometry.model_dump(), "expert_biases": False})
    with_biases, without = (bit_slice_bytes(g, 4, 2) for g in (geometry, bare))

    assert with_biases == (without[0] + 2 * 3 * 2880, without[1])


def test_codes_and_zero_points_end_on_whole_bytes() -> None:
    geometry = Geometry(
        name="odd", n_experts=2, top_k=1, moe_layers=[0], hidden=3, moe_intermediate=5
    )
    with pytest.raises(InputError, match=r"rows of 5 weights .* groups of 3"):
        bit_slice_bytes(geometry, 4, 3, group=3)

    # gate and up: 10 rows of 3, each code with a zero-point of its own; down: 3 rows of 5
    assert bit_slice_bytes(geometry, 4, 3, group=1) == (2 * 12 + 60 + 2 * 6 + 30, 2 * 4 + 2 * 2)


@pytest.mark.parametrize(("high", "low"), [(4, 4), (4, 0), (9, 4), (2, 3)])
def test_bits_that_make_no_slices_are_refused(high: int, low: int) -> None:
    with pytest.raises(InputError, match=f"{high}/{low} bits are out of range; use 1 <= low"):
        bit_slice_bytes(load_geometry("moe-tiny"), high, low)


def test_bit_slices_need_the_size_of_an_expert() -> None:
    geometry = Geometry(name="unknown", n_experts=2, top_k=1, moe_layers=[0])
    with pytest.raises(InputError, match="no hidden, moe_intermediate"):
        bit_slice_bytes(geometry, 8, 4)
