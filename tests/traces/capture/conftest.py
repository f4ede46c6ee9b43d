"""Tiny random models of many families, built from configurations."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="capture needs the extra 'models'")
transformers = pytest.importorskip("transformers", reason="capture needs the extra 'models'")

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPE = {"intermediate_size": 24, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
NAMED: dict[str, dict[str, Any]] = {
    "experts": {**SHAPE, "num_experts": 8},
    "routed": {**SHAPE, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "local": {"intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2},
}
LATENT = {
    **NAMED["routed"],
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_group": 2,
    "topk_group": 1,
}
LINEAR = {
    "num_hidden_layers": 4,
    "shared_expert_intermediate_size": 16,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
# family -> (model class, configuration class, arguments)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", NAMED["local"]),
    "Qwen2Moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            **NAMED["experts"],
            "num_hidden_layers": 3,
            "num_experts_per_tok": 3,
            "shared_expert_intermediate_size": 20,
            "mlp_only_layers": [1],
        },
    ),
    "Qwen3Moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**NAMED["experts"], "head_dim": 8, "norm_topk_prob": True},
    ),
    "Qwen3VLMoe": (
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3VLMoeConfig",
        {
            "text_config": {
                **SMALL,
                **NAMED["experts"],
                "head_dim": 8,
                "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]},
            },
            "vision_config": VISION,
            "image_token_id": 60,
            "video_token_id": 61,
            "vision_start_token_id": 62,
            "vision_end_token_id": 63,
        },
    ),
    "Qwen3_5Moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", {**NAMED["experts"], **LINEAR}),
    "Qwen3Next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", {**NAMED["experts"], **LINEAR}),
    "DeepseekV2": (
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {**LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    ),
    "DeepseekV3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**LATENT, "q_lora_rank": 16}),
    "GptOss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **NAMED["local"],
            "head_dim": 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": ROPE,
        },
    ),
    "Olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {**NAMED["experts"], "intermediate_size": 16}),
    "GraniteMoe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", NAMED["local"]),
    "Gemma4": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            **NAMED["experts"],
            "top_k_experts": 2,
            "enable_moe_block": True,
            "head_dim": 8,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 64,
            "num_kv_shared_layers": 0,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "Phimoe": ("PhimoeForCausalLM", "PhimoeConfig", NAMED["local"]),
    "Glm4Moe": (
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        {**NAMED["routed"], "head_dim": 8, "n_group": 1, "topk_group": 1},
    ),
    "MiniMaxM2": ("MiniMaxM2ForCausalLM", "MiniMaxM2Config", {**NAMED["local"], "head_dim": 8}),
    "Ernie4_5Moe": (
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        {
            "intermediate_size": 24,
            "moe_intermediate_size": 16,
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
        },
    ),
    "Lfm2Moe": (
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        {
            **NAMED["experts"],
            "num_hidden_layers": 3,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention", "conv"],
        },
    ),
    "Jamba": (
        "JambaForCausalLM",
        "JambaConfig",
        {
            **NAMED["experts"],
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
    ),
    "NemotronH": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **NAMED["routed"],
            "num_hidden_layers": None,
            "layers_block_type": ["mamba", "attention", "moe"],
            "moe_shared_expert_intermediate_size": 16,
            "moe_latent_size": 24,
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 4,
        },
    ),
}
UNSEEN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **NAMED["local"],
            "intermediate_size_mlp": 24,
            "num_experts_per_tok": 1,
            "head_dim": 8,
            "interleave_moe_layer_step": 1,
        },
    ),
    "JetMoe": ("JetMoeForCausalLM", "JetMoeConfig", {**NAMED["local"], "kv_channels": 8}),
    "Dbrx": (
        "DbrxForCausalLM",
        "DbrxConfig",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "vocab_size": 64,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "SwitchTransformers": (
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 16,
            "num_heads": 4,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_experts": 4,
            "vocab_size": 64,
        },
    ),
    "Qwen3 (dense)": ("Qwen3ForCausalLM", "Qwen3Config", {"intermediate_size": 16, "head_dim": 8}),
}
OWN_SIZES = ("Qwen3VLMoe", "Dbrx", "SwitchTransformers")


def build_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """Return a small random model of *family*; *changes* go over its configuration."""
    model_class, config_class, arguments = {**FAMILIES, **UNSEEN}[family]
    small = {} if family in OWN_SIZES else SMALL
    sizes = {**small, **arguments, **changes}
    sizes = {key: value for key, value in sizes.items() if value is not None or "rank" in key}
    with warnings.catch_warnings(), torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, model_class)(getattr(transformers, config_class)(**sizes))
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("gate.weight", "router.weight", "router.proj.weight")):
                value.data.normal_(std=0.3)  # some families start with zeros
            if name.endswith(("correction_bias", "expert_bias", "proj_bias", "router.bias")):
                value.data.normal_(std=0.1)
            if name.endswith("per_expert_scale"):
                value.data.uniform_(0.5, 1.5)
            if ".experts." in name and value.dim() == 3:
                value.data.normal_(std=0.2)
    return model.eval()


class WordTokenizer:
    """Gives each word an id from 3 up; 0 pads, 1 begins and 2 ends."""

    pad_token_id = 0
    eos_token_id = 2

    def __call__(self, text: str) -> dict[str, list[int]]:
        """Return the ids of *text*."""
        return {"input_ids": [3 + sum(map(ord, word)) % 57 for word in text.split()]}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    kept = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(kept)


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=sorted(UNSEEN))
def unseen_family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def build() -> Callable[..., Any]:
    return build_model


@pytest.fixture
def tokenizer() -> WordTokenizer:
    return WordTokenizer()
