"""Tests of what the name of a model file tells."""

from __future__ import annotations

import pytest

from moetier.traces.errors import InputError
from moetier.traces.geometry import load_geometry, published
from moetier.traces.importers._names import find_published, fit_geometry, split_model_name


@pytest.mark.parametrize(
    ("name", "model", "weights"),
    [
        ("Qwen3-30B-A3B-Q4_K_M.gguf", "Qwen3-30B-A3B", "q4_k_m"),
        ("/data/models/gemma-4-26B-A4B-it-UD-Q4_K_XL.gguf", "gemma-4-26B-A4B-it", "q4_k_xl"),
        ("C:\\m\\gpt-oss-120b-MXFP4.gguf", "gpt-oss-120b", "mxfp4"),
        ("gpt-oss-20b-MXFP4_MOE.gguf", "gpt-oss-20b", "mxfp4"),
        ("Mixtral-8x7B-v0.1.Q4_0.gguf", "Mixtral-8x7B-v0.1", "q4_0"),
        ("Qwen3-235B-A22B-BF16-00001-of-00010.gguf", "Qwen3-235B-A22B", "bf16"),
        ("model-IQ2_XXS.gguf", "model", "iq2_xxs"),
        ("OLMoE-1B-7B-0924", "OLMoE-1B-7B-0924", None),
    ],
)
def test_model_and_format_are_told_apart(name: str, model: str, weights: str | None) -> None:
    assert split_model_name(name) == (model, weights)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("gpt_oss_20b", "gpt-oss-20b"),
        ("gemma-4-26B-A4B-it", "gemma-4-26b-a4b"),
        ("deepseek-vl2-tiny", "deepseek-vl2-tiny"),
        ("deepseek-vl2", "deepseek-vl2"),
        ("Qwen3-30B-A3Bold", None),
        ("llama", None),
    ],
)
def test_the_longest_published_name_that_begins_it_is_taken(name: str, known: str | None) -> None:
    found = find_published(name)

    assert (found and found.name) == known


@pytest.mark.parametrize("name", published())
def test_every_published_name_finds_itself(name: str) -> None:
    assert find_published(name) == load_geometry(name)


LAYERS = list(range(48))


def test_published_sizes_are_used_with_the_trace_s_top_k() -> None:
    geometry, unknown = fit_geometry(
        "Qwen3-30B-A3B", None, n_experts=128, top_k=6, moe_layers=LAYERS, n_layers=48, where="t"
    )

    assert (geometry.name, geometry.top_k, geometry.hidden) == ("qwen3-30b-a3b", 6, 2048)
    assert unknown == []


@pytest.mark.parametrize(
    ("n_experts", "moe_layers", "n_layers", "words"),
    [
        (64, LAYERS, 48, "it has 128 experts, the trace 64"),
        (128, LAYERS[1:], 48, "its MoE layers are"),
        (128, LAYERS, 50, "it has 48 layers, the trace 50"),
    ],
)
def test_a_name_alone_does_not_make_a_model(
    n_experts: int, moe_layers: list[int], n_layers: int, words: str
) -> None:
    def fit(model: str | None) -> tuple[str, int | None, list[str]]:
        geometry, unknown = fit_geometry(
            "Qwen3-30B-A3B", model, n_experts=n_experts, top_k=6, moe_layers=moe_layers,
            n_layers=n_layers, where="t",
        )  # fmt: skip
        return geometry.name, geometry.hidden, unknown

    assert fit(None) == (
        "Qwen3-30B-A3B",
        None,
        ["geometry.hidden", "geometry.moe_intermediate", "geometry.heads"],
    )
    with pytest.raises(InputError, match=f"model 'qwen3-30b-a3b' does not fit the trace: {words}"):
        fit("qwen3-30b-a3b")
