"""Small models of many architectures."""

from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from raymill.training import composite

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "vocab_size_per_layer_input": 128,  # of Gemma 4; the default takes a gigabyte
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
GROUPS = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
WINDOW = {"head_dim": 8, "sliding_window": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": WINDOW,
    "Mixtral": {"num_local_experts": 4},
    "Ministral3": {"head_dim": 8},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "Qwen3": {"head_dim": 8},
    "Qwen3Moe": EXPERTS | {"num_experts": 4, "head_dim": 8},
    "Gemma2": WINDOW,
    "Gemma3Text": WINDOW,
    "Gemma4Text": {"head_dim": 8},
    "GptOss": WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Phi3": {"sliding_window": 8},
    "DeepseekV3": EXPERTS | LATENT | GROUPS,
    "Glm4": {"head_dim": 8},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 8},
    "Granite": {},
    "GraniteMoeHybrid": {"shared_intermediate_size": 32, "mamba_n_heads": 4, "layer_types": ["attention"] * 4},
    "SmolLM3": {},
}


# Composite families: changes to the text model, and to the vision tower.
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
PATCHES = TOWER | {"image_size": 28, "patch_size": 14}
BLOCKS = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_position_embeddings": 64}
COMPOSITES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Gemma3": (WINDOW, PATCHES | {"vision_use_head": False}),
    "Gemma4": ({"head_dim": 8}, TOWER | {"head_dim": 16, "num_key_value_heads": 2}),
    "Llama4": (
        {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 64},
        PATCHES | {"intermediate_size": 128} | dict.fromkeys(("projector_input_dim", "vision_output_dim"), 32),
    ),
    "Mistral3": ({"model_type": "ministral3", "head_dim": 8}, PATCHES | {"model_type": "pixtral", "head_dim": 16}),
    "Qwen3_5": (LINEAR | {"head_dim": 16}, BLOCKS),
    "Qwen3_5Moe": (
        LINEAR | EXPERTS | {"head_dim": 16, "num_experts": 4, "shared_expert_intermediate_size": 16},
        BLOCKS,
    ),
}


def build(family: str, **changes: Any) -> PreTrainedModel:
    """Return an untrained model with the attention that training chooses on a CPU."""
    torch.manual_seed(0)
    config = config_of(family, **changes)
    return composite.auto_class(config).from_config(config, attn_implementation=None).eval()


def config_of(family: str, **changes: Any) -> PreTrainedConfig:
    """Return the configuration of a small model. `changes` are those of its text model."""
    config_type = getattr(transformers, f"{family}Config")
    if family in FAMILIES:
        return config_type(**{**SIZES, **FAMILIES[family], **changes})
    text, vision = COMPOSITES[family]
    text = {**SIZES, **text, **changes}
    vision = vision | {"out_hidden_size": text["hidden_size"], "projector_output_dim": 32}
    return config_type(text_config=text, vision_config=vision, image_token_id=text["vocab_size"] - 1)
