"""Small models of many architectures."""

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

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


def build(family: str, **changes: Any) -> PreTrainedModel:
    """Return an untrained model with the attention that training chooses on a CPU."""
    config: PreTrainedConfig = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family], **changes})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=None).eval()
