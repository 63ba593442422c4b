"""Corrects what vLLM 0.29 gets wrong in models that transformers trains. Without it, answers differ from training.

- Mistral 3 does not start, because transformers has renamed what vLLM imports (vLLM's pull request 56484).
- YaRN: vLLM ignores `attention_factor`, `mscale` and `mscale_all_dim`, and the scaling of queries that Ministral 3 has
  in its RoPE parameters (vLLM's issue 48621). Attention is then wrong by the square of 1.28, without an error.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from raymill.model_config import text_config

CLASSES = {"Mistral3ForConditionalGeneration": "raymill.serving.mistral3:Mistral3ForConditionalGeneration"}
"""Architectures, and the classes that serve them instead of vLLM's."""


def arguments(engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's arguments that correct models. `engine` are the user's arguments, which are kept."""
    return {
        "hf_overrides": functools.partial(override, engine.get("hf_overrides", {})),
        "model_class_overrides": CLASSES | engine.get("model_class_overrides", {}),
    }


def override(overrides: Mapping[str, Any], config: PreTrainedConfig) -> PreTrainedConfig:
    """Change a model's configuration by the user's `hf_overrides`, as vLLM does, and correct its RoPE parameters."""
    _update(config, overrides)
    _correct_yarn(text_config(config))
    return config


def _update(config: PreTrainedConfig, overrides: Mapping[str, Any]) -> None:
    for name, value in overrides.items():
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            _update(part, value)
        else:
            setattr(config, name, value)


def _correct_yarn(config: PreTrainedConfig) -> None:
    """Express in vLLM's terms how transformers scales attention.

    transformers multiplies cosines and sines by its attention factor, vLLM by `attn_factor` * (0.1 ln(`factor`) + 1).
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "yarn" or hasattr(config, "kv_lora_rank"):
        return  # for latent attention, vLLM reads mscale itself
    if not rope.keys() & {"attn_factor", "apply_yarn_scaling"}:
        _, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
        rope["attn_factor"] = attention_factor / (0.1 * math.log(max(rope["factor"], 1)) + 1)
    if "llama_4_scaling_beta" in rope and not hasattr(config, "llama_4_scaling"):
        scaling = {"beta": rope["llama_4_scaling_beta"]}
        config.llama_4_scaling = scaling | {
            "original_max_position_embeddings": rope["original_max_position_embeddings"]
        }
